"""When ranks start again in their pod, and when the pod ends: by the failure, the checkpoints, and what came before."""

import signal
from typing import Any

import pytest

from disttrain_agent.restart import Failure, Kept, Leave, Limits, Record, Restart, after
from disttrain_agent.verdict import RankEnd
from disttrain_api.names import PERMANENT, ExitCode, Reason
from disttrain_api.report import FailureSignature, RankError, RankReport

LIMITS = Limits(restarts=3, backoff_seconds=10)
TYPO = FailureSignature(error="NameError", place="/app/model.py:12", step=4, steps_done=4)


def failed(code: int = 1, *, signature: FailureSignature | None = None, **facts: Any) -> Failure:
    """How a rank has failed that said this of its error."""
    error = RankError(exit_code=code, reason="RankFailed", message="no", signature=signature)
    return Failure(RankEnd(rank=1, returncode=code, report=RankReport(rank=1, error=error)).as_failure(), Kept(**facts))


def killed(number: int = signal.SIGKILL, **facts: Any) -> Failure:
    return Failure(RankEnd(rank=1, returncode=-number).as_failure(), Kept(**facts))


def out_of_memory(checkpoint: int | None = None) -> Failure:
    """How a rank has failed that the kernel has killed for want of memory."""
    cause = killed().cause.model_copy(update={"reason": Reason.OOM_KILLED, "out_of_memory": True})
    return Failure(cause, Kept(checkpoint))


def lives(*failures: Failure, limits: Limits = LIMITS) -> list[int | str]:
    """The pauses after failures that follow each other; of the last one why the pod ends, if it does."""
    record, seen = Record(), []
    for failure in failures:
        follows = after(failure, record, limits)
        if isinstance(follows, Leave):
            return [*seen, follows.why]
        assert isinstance(follows, Restart)
        record, seen = follows.record, [*seen, follows.pause_seconds]
    return seen


@pytest.mark.parametrize(
    "failure",
    [
        killed(),
        killed(signal.SIGSEGV),
        failed(1),
        failed(ExitCode.LEFT_EARLY),
        failed(ExitCode.PEER_LOST),
        failed(ExitCode.NON_FINITE_LOSS),
    ],
    ids=["killed", "crashed", "raised", "left early", "lost a peer", "not finite"],
)
def test_what_may_pass_is_restarted_at_once(failure: Failure) -> None:
    assert after(failure, Record(), LIMITS) == Restart(0, Record(1, 1))


NEVER = sorted(
    {
        *PERMANENT,
        ExitCode.FENCED,
        ExitCode.EVALUATION_ABORTED,
        ExitCode.PORT_IN_USE,
        ExitCode.DISK_FULL,
        ExitCode.NETWORK_FAULTY,
        ExitCode.STOPPED,
    }
)


@pytest.mark.parametrize("code", NEVER, ids=lambda code: code.name)
def test_what_another_pod_or_nobody_can_mend_ends_the_pod(code: ExitCode) -> None:
    follows = after(failed(code), Record(), LIMITS)
    assert isinstance(follows, Leave)
    assert not follows.repeated


def test_a_rank_that_runs_out_of_memory_starts_again_once_without_a_new_checkpoint() -> None:
    again = "a rank has run out of memory again, without a new checkpoint in between"
    assert lives(out_of_memory(), out_of_memory()) == [0, again]
    assert lives(out_of_memory(), killed(), out_of_memory()) == [0, 10, again], "others between do not hide it"
    assert lives(*(out_of_memory(step) for step in (None, 10, 20, 20))) == [0, 0, 0, again]
    assert lives(out_of_memory(), limits=Limits(0, 10)) == [
        "0 restarts in place without a new checkpoint are used up"
    ], "it is one of those"


def test_restarts_without_a_new_checkpoint_are_bounded_and_wait_twice_as_long_each_time() -> None:
    used_up = "4 restarts in place without a new checkpoint are used up"
    assert lives(*[killed()] * 6, limits=Limits(4, 10)) == [0, 10, 20, 40, used_up]
    assert lives(killed(), limits=Limits(0, 10)) == ["0 restarts in place without a new checkpoint are used up"]
    assert lives(*[killed()] * 12, limits=Limits(100, 10))[-3:] == [2560, 3600, 3600], "an hour at most"


def test_a_new_checkpoint_begins_the_count_again_and_the_one_that_was_resumed_from_does_not() -> None:
    assert lives(*(killed(checkpoint=step) for step in (50, 50, 60, 60, 60))) == [0, 10, 0, 10, 20]
    assert lives(*(killed(checkpoint=step) for step in (None, None, 10, 10))) == [0, 10, 0, 10]
    assert lives(killed(checkpoint=50), killed(), killed(checkpoint=40)) == [0, 10, 20], "none is lost"


def test_steps_that_were_kept_in_memory_begin_the_count_again() -> None:
    """By the steps after which the lives went on that have failed."""
    assert lives(*(killed(began=step) for step in (0, 20, 40, 60, 80))) == [0, 0, 0, 0, 0]
    used_up = "3 restarts in place without a new checkpoint are used up"
    assert lives(*(killed(began=step) for step in (100, 100, 100, 100))) == [0, 10, 20, used_up], "nothing was kept"
    assert lives(*(killed(began=step) for step in (100, 103, 106, 109))) == [0, 10, 20, used_up], "hardly anything was"
    assert lives(*(killed(began=step) for step in (100, 104, 108, 112))) == [0, 10, 20, 0], "in all it was more"
    assert lives(*(killed(began=step) for step in (None, None, 0, 20))) == [0, 10, 20, 0], "0 is no gain"
    assert lives(*(killed(began=step) for step in (100, 50, 100, 50))) == [0, 10, 20, used_up], "it was lost again"
    assert lives(killed(checkpoint=50, began=0), killed(checkpoint=50, began=50)) == [0, 10], "it is the checkpoint's"
    again = "a rank has run out of memory again, without a new checkpoint in between"
    grown = [Failure(out_of_memory().cause, Kept(began=step)) for step in (0, 50)]
    assert lives(*grown) == [0, again]


@pytest.mark.parametrize(
    ("second", "repeated"),
    [
        (failed(signature=TYPO), True),
        (failed(signature=TYPO, checkpoint=4), False),
        (failed(signature=TYPO.model_copy(update={"step": 5})), False),
        (failed(signature=TYPO.model_copy(update={"place": "/app/model.py:13"})), False),
        (failed(), False),
        (killed(), False),
    ],
    ids=["the same", "a checkpoint between", "a step further", "elsewhere", "no signature", "from outside"],
)
def test_the_same_failure_again_without_a_checkpoint_between_ends_the_pod(second: Failure, repeated: bool) -> None:
    first = after(failed(signature=TYPO), Record(), LIMITS)
    assert isinstance(first, Restart)
    follows = after(second, first.record, LIMITS)
    assert isinstance(follows, Leave) is repeated
    assert not isinstance(follows, Leave) or follows.repeated


def test_a_kill_between_two_equal_failures_hides_nothing() -> None:
    same = failed(signature=TYPO)
    assert lives(same, killed(), same) == [0, 10, "NameError came again, and no step was done in between"]


def test_the_number_of_restarts_never_goes_back() -> None:
    follows = after(killed(checkpoint=9), Record(restarts=7, since_checkpoint=3, checkpoint=5), LIMITS)
    assert follows == Restart(0, Record(restarts=8, since_checkpoint=1, checkpoint=9, began=9))
