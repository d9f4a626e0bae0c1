"""Waiting for the master's name."""

from dataclasses import replace
from pathlib import Path

import pytest

from disttrain_agent import master_address, resolve
from disttrain_agent.environment import PodEnvironment
from disttrain_agent.life import Timing
from disttrain_agent.reports import TerminationMessage
from disttrain_agent.resolve import LIMIT_SECONDS, OWN_NAME_SECONDS, wait_for_address
from disttrain_agent.supervise import Supervisor
from disttrain_api.names import Env, ExitCode
from disttrain_api.report import decode_pod_report


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


NOBODY = "digits-0.no-such-host.invalid"
OWN = "it is this pod's own name: the cluster's DNS cannot be reached from here, or the job's Service is gone"
OTHERS = "worker 0 or the cluster's DNS cannot be reached"


@pytest.mark.parametrize(
    ("node_rank", "code", "why"), [(0, ExitCode.NETWORK_FAULTY, OWN), (1, ExitCode.PEER_LOST, OTHERS)]
)
async def test_the_master_that_does_not_find_its_own_name_is_the_cause_and_the_others_lost_a_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_rank: int, code: ExitCode, why: str
) -> None:
    """Each waits as long as it may: the other one's limit is out of reach."""
    limit = {0: 0.05, 1: 3600.0}[node_rank]
    monkeypatch.setattr(master_address, "LIMIT_SECONDS", 3600.05 - limit)
    pod = PodEnvironment(node_rank, 1, NOBODY, tmp_path / "job.json", tmp_path, 1.0, {})
    termination_message = TerminationMessage(tmp_path / "termination-message")
    ended = await Supervisor(pod, ["true"], termination_message, timing=Timing(own_name=limit)).run()
    report = decode_pod_report((tmp_path / "termination-message").read_text())
    assert ended == code
    assert (report.failure.exit_code, report.failure.message) == (code, f"{NOBODY} has no address: {why}")


@pytest.mark.parametrize(("node_rank", "replacement", "awaits"), [(0, 0, True), (0, 2, False), (1, 2, True)])
def test_another_pod_of_worker_0_alone_waits_for_no_name(
    tmp_path: Path, node_rank: int, replacement: int, awaits: bool
) -> None:
    pod = PodEnvironment(node_rank, 1, NOBODY, tmp_path / "job.json", tmp_path, 1.0, {}, replacement=replacement)
    assert pod.awaits_address is awaits
    assert not replace(pod, config=None).awaits_address, "a program of the user's own looks for its peers itself"


@pytest.mark.parametrize(
    ("own", "found", "meets"),
    [(NOBODY, "10.0.0.7", "10.0.0.7"), (NOBODY, "fd00::7", "fd00::7"), (NOBODY, None, NOBODY),
     (NOBODY, "127.0.0.1", NOBODY), (NOBODY, "::1", NOBODY), ("127.0.0.1", "127.0.0.1", "127.0.0.1")],
)  # fmt: skip
@pytest.mark.parametrize("has_config", [True, False])
def test_ranks_meet_where_the_others_have_found_their_agent_unless_a_proxy_has(
    tmp_path: Path, own: str, found: str | None, meets: str, has_config: bool
) -> None:
    config = tmp_path / "job.json" if has_config else None
    pod = PodEnvironment(0, 1, own, config, tmp_path, 1.0, {Env.MASTER_ADDR: own})
    assert pod.of_rank(0, 1, None, found)[Env.MASTER_ADDR] == meets


def test_the_master_waits_for_its_own_name_for_less_than_the_others_wait_for_it() -> None:
    assert Timing().own_name == OWN_NAME_SECONDS < LIMIT_SECONDS
