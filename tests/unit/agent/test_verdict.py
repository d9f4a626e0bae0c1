"""Which rank failed first, and the exit code of the pod."""

import pytest

from disttrain_api.names import ExitCode
from disttrain_api.report import RankError, RankReport
from disttrain_trainer.agent.verdict import RankEnd, exit_code, first_cause


def an_end(rank: int, returncode: int, *, told: bool = False, said: int | None = None, done: bool = False) -> RankEnd:
    error = RankError(exit_code=said, reason="Said", message="it said so") if said else None
    return RankEnd(rank, returncode, told, RankReport(rank=rank, error=error, done=done))


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([an_end(0, 0), an_end(1, 0)], None),
        ([an_end(0, 1), an_end(1, 1)], 0),
        ([an_end(0, 91), an_end(1, 1)], 1),
        ([an_end(0, 91), an_end(1, -9)], 1),
        ([an_end(0, -6), an_end(1, -9)], 1),
        ([an_end(0, -6), an_end(1, 1)], 1),
        ([an_end(0, -6, said=91), an_end(1, -6)], 1),
        ([an_end(0, 1), an_end(1, 81)], 1),
        ([an_end(0, 91), an_end(1, 143, told=True), an_end(2, -15, told=True), an_end(3, 3)], 3),
        ([an_end(0, 1), an_end(1, -9, told=True)], 0),
        ([an_end(0, -6, done=True), an_end(1, 91)], 1),
        ([an_end(0, 91), an_end(1, 91)], 0),
    ],
)
def test_the_cause_is_the_failure_that_explains_the_others(ends: list[RankEnd], cause: int | None) -> None:
    found = first_cause(ends)
    assert (found.rank if found else None) == cause


@pytest.mark.parametrize(
    ("ends", "stopped", "code"),
    [
        ([an_end(0, 0)], False, 0),
        ([an_end(0, 0)], True, 0),
        ([an_end(0, -9)], False, 137),
        ([an_end(0, -6, done=True)], False, 0),
        ([an_end(0, -6, said=81)], False, 81),
        ([an_end(0, 143)], True, ExitCode.STOPPED),
        ([an_end(0, 1)], True, ExitCode.STOPPED),
        ([an_end(0, 0), an_end(1, -9, told=True)], True, ExitCode.STOPPED),
        ([an_end(0, 85), an_end(1, 143)], True, ExitCode.STORAGE_FULL),
    ],
)
def test_the_exit_code_is_that_of_the_cause(ends: list[RankEnd], stopped: bool, code: int) -> None:
    assert exit_code(ends, stopped=stopped) == code
