"""Waiting for the master's name."""

import pytest

from disttrain_agent import resolve
from disttrain_agent.resolve import wait_for_address


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "_RETRY_SECONDS", 0.001)


async def test_a_name_that_appears_later_is_waited_for_and_the_wait_is_said_once() -> None:
    answers = iter([OSError("unknown"), OSError("unknown"), OSError("unknown"), None])

    def lookup(host: str) -> None:
        error = next(answers)
        if error is not None:
            raise error

    said: list[str] = []
    assert await wait_for_address("digits-0", said.append, lookup=lookup)
    assert said[0] == "waiting for the address of digits-0 (unknown)"
    assert said[1].startswith("digits-0 has an address after")
    assert len(said) == 2


async def test_the_wait_has_an_end() -> None:
    def lookup(host: str) -> None:
        raise OSError("unknown")

    said: list[str] = []
    assert not await wait_for_address("digits-0", said.append, lookup=lookup, limit=0.05)
    assert "giving up" in said[-1]


async def test_a_name_that_is_none_does_not_end_the_agent() -> None:
    said: list[str] = []
    assert not await wait_for_address("x" * 70 + ".example", said.append, limit=0.05)
    assert "giving up" in said[-1]
