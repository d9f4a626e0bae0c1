"""Which rank failed first, and the exit code of the pod."""

import pytest

from disttrain_agent.verdict import RankEnd, exit_code, first_cause
from disttrain_api.names import ExitCode
from disttrain_api.report import RankError, RankReport


def an_end(
    rank: int, returncode: int, *, signaled: bool = False, said: int | None = None, done: bool = False
) -> RankEnd:
    error = RankError(exit_code=said, reason="Said", message="it said so") if said else None
    return RankEnd(rank, returncode, signaled, RankReport(rank=rank, error=error, done=done))


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
        ([an_end(0, 91), an_end(1, 143, signaled=True), an_end(2, -15, signaled=True), an_end(3, 3)], 3),
        ([an_end(0, 1), an_end(1, -9, signaled=True)], 0),
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
        ([an_end(0, 0), an_end(1, -9, signaled=True)], True, ExitCode.STOPPED),
        ([an_end(0, 85), an_end(1, 143)], True, ExitCode.STORAGE_FULL),
    ],
)
def test_the_exit_code_is_that_of_the_cause(ends: list[RankEnd], stopped: bool, code: int) -> None:
    assert exit_code(ends, stopped=stopped) == code


def a_trainer(returncode: int, *, signaled: bool = False, report: RankReport | None = None) -> RankEnd:
    return RankEnd(1, returncode, signaled, report, must_report=True)


AT_9 = RankReport(rank=1, step=9, total_steps=20)


@pytest.mark.parametrize(
    ("end", "code", "message"),
    [
        (a_trainer(0, report=AT_9), ExitCode.LEFT_EARLY, "left at step 9 of 20 with exit code 0 before its work was"),
        (a_trainer(0), ExitCode.LEFT_EARLY, "left before its first step with exit code 0"),
        (a_trainer(0, signaled=True, report=AT_9), ExitCode.STOPPED, None),
        (a_trainer(3, report=AT_9), 3, None),
    ],
)
def test_a_rank_of_the_trainer_that_is_not_done_has_failed(end: RankEnd, code: int, message: str | None) -> None:
    assert not end.succeeded
    assert exit_code([an_end(0, 91), end], stopped=False) == code
    failure = end.as_failure()
    if message is not None:
        assert failure.reason == "LeftEarly"
        assert failure.message.startswith(message)


@pytest.mark.parametrize("returncode", [0, 1, -6])
def test_a_rank_of_the_trainer_that_is_done_has_succeeded(returncode: int) -> None:
    assert a_trainer(returncode, report=AT_9.model_copy(update={"done": True})).succeeded


def test_a_rank_that_left_early_explains_peers_that_lost_it_and_those_that_were_stopped() -> None:
    left = a_trainer(0, report=AT_9)
    assert first_cause([an_end(0, 91), an_end(2, 143, signaled=True), an_end(3, -6), left]) is left


def test_a_rank_that_reported_nothing_is_described_by_its_exception_else_by_its_last_line() -> None:
    traceback = ("Traceback (most recent call last):", '  File "a.py", line 3, in <module>', "    f()", "KeyError: 1")
    assert RankEnd(0, 1, tail=(*traceback, "bye")).as_failure().message == "KeyError: 1"
    assert RankEnd(0, 1, tail=("hello", "bye")).as_failure().message == "bye"
    assert RankEnd(0, -9, tail=("hello", "bye")).as_failure().message is None


def test_exit_code_0_of_an_own_command_is_success() -> None:
    assert RankEnd(1, 0, report=AT_9).succeeded


def test_of_words_that_a_rank_leaves_only_the_type_of_its_exception_is_no_quote() -> None:
    ended = RankEnd(0, 1, tail=("a line", "ValueError: a secret")).as_failure()
    assert (ended.message, ended.unquoted) == ("ValueError: a secret", "ValueError")
    assert RankEnd(0, 80, tail=("a secret",)).as_failure().unquoted == ""
    left_early = RankEnd(0, 0, must_report=True).as_failure()
    assert (left_early.message or "").startswith("left before its first step")
    assert left_early.unquoted is None
