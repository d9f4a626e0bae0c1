"""The last words of pods, made to hurt, on a real API server."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.operator_process import OperatorProcess, Team, eventually, running_operator
from tools.cluster.control_plane import ControlPlane

NUMBERS = itertools.count()


@pytest.fixture
def operator(control_plane: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, tmp_path) as started:
        yield started


@pytest.fixture
def evil(control_plane: ControlPlane) -> Team:
    return Team(control_plane.api, f"evil-{next(NUMBERS)}")


LAST_WORDS = {
    "not-a-number": '{"progress": {"rank": 0, "step": 5, "totalSteps": 9, "loss": NaN, "samplesPerSecond": Infinity}}',
    "beyond-64-bits": '{"progress": {"rank": 0, "step": 1180591620717411303424, "totalSteps": 9}}',
    "no-time": '{"progress": {"rank": 0, "checkpoint": {"step": 5, "path": "x", "time": "soon"}}}',
    "half-a-character": '{"failure": {"rank": 0, "exitCode": 1, "message": "\\ud800", "logTail": "\\u0000"}}',
    "a-figure-without-a-name": '{"progress": {"rank": 0, "step": 5, "totalSteps": 9, "metrics": {"": 1, "x": 1e999}}}',
    "deep": '{"failure":' * 300 + "1" + "}" * 300,
}


@pytest.mark.parametrize("text", LAST_WORDS.values(), ids=LAST_WORDS.keys())
def test_odd_last_words_do_not_hold_their_job(operator: OperatorProcess, evil: Team, text: str) -> None:
    evil.create()
    first, second = evil.wait_for_pods(2)
    evil.run([first, second])
    evil.wait_for("Running")
    evil.finish([first, second], code=1, message=text)
    eventually(lambda: evil.status().get("attempt") == 2, lambda: [evil.status(), operator.log()[-2000:]])
    assert evil.status()["attempts"][0]["verdict"]["exitCode"] == 1
    assert "trying again" not in operator.log()
