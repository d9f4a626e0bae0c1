"""What becomes of a request for a checkpoint: each end of the wait is a sentence, and none comes in silence."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from disttrain.checkpoint_request import wait_for_checkpoint
from disttrain.client import Client
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain_api.names import CHECKPOINT_REQUEST
from tests.builders import a_raw_job
from tests.unit.cli.fake_api import a_condition

WRITTEN = {"step": 7, "path": "/checkpoints/digits/step-7", "time": "2026-11-01T00:00:00Z"}
TAKEN = {"value": "mine", "attempt": 1}


def a_job(*holding: str, suspend: bool = False, uid: str | None = None, **status: Any) -> RemoteJob:
    raw = a_raw_job(suspend=suspend, status={"phase": "", "attempt": 1} | status)
    raw["status"]["conditions"] = [a_condition(type_) for type_ in holding]
    raw["metadata"] |= {"annotations": {CHECKPOINT_REQUEST: "mine"}} | ({} if uid is None else {"uid": uid})
    return RemoteJob(raw)


def ended(number: int, reason: str = "RankFailed") -> dict[str, Any]:
    time = "2026-11-01T00:00:00Z"
    return {"number": number, "startTime": time, "endTime": time, "verdict": {"reason": reason, "message": "it is so"}}


class Watched:
    """A cluster on which the job becomes one after the other of these; time passes where nothing changes any more."""

    def __init__(self, *jobs: RemoteJob) -> None:
        self._jobs, self._at, self.now = jobs, 0, 0.0

    def follow(self, name: str, *, namespace: str, look_again_at: float | None) -> Iterator[RemoteJob]:
        yield self._jobs[self._at]
        while self._at + 1 < len(self._jobs):
            self._at += 1
            yield self._jobs[self._at]
        while not self._jobs[self._at].finished:
            assert look_again_at is not None, "it waits without a limit"
            self.now = max(self.now, look_again_at)
            yield self._jobs[self._at]

    def wait(self) -> tuple[int, list[str]]:
        sentences: list[str] = []
        asked = a_job("Running")
        written = wait_for_checkpoint(cast(Client, self), asked, sentences.append, seconds=5, clock=lambda: self.now)
        return written.step, sentences


def test_it_says_that_ranks_have_taken_the_request_and_waits_for_the_checkpoint() -> None:
    taken = a_job("Running", checkpointRequest=TAKEN)
    watched = Watched(a_job("Running"), taken, taken, a_job("Running", checkpoint=WRITTEN))
    assert watched.wait() == (7, ["the ranks of attempt 1 have taken the request: they save after a step"])


def test_the_next_attempt_takes_the_request_along() -> None:
    """Red where what a former attempt has taken counts as taken by this one."""
    watched = Watched(
        a_job("Running", checkpointRequest=TAKEN),
        a_job("Restarting", checkpointRequest=TAKEN, attempts=[ended(1)]),
        a_job("Starting", checkpointRequest=TAKEN, attempt=2, attempts=[ended(1)]),
        a_job("Running", checkpointRequest=TAKEN, attempt=2, attempts=[ended(1)]),
        a_job("Running", checkpointRequest=TAKEN | {"attempt": 2}, attempt=2, attempts=[ended(1)]),
        a_job("Running", checkpoint=WRITTEN, attempt=2),
    )
    assert watched.wait() == (
        7,
        [
            "the ranks of attempt 1 have taken the request: they save after a step",
            "attempt 1 has ended (RankFailed): the next one takes the request along once it trains",
            "the ranks of attempt 2 have taken the request: they save after a step",
        ],
    )


@pytest.mark.parametrize("of", [{"value": "another's", "attempt": 1}, {"value": "mine", "attempt": 0}, None])
@pytest.mark.parametrize(
    ("phase", "why"),
    [
        (None, "its agent does not answer the operator"),
        ("Starting", "they have not begun to train"),
        ("Training", "is of an earlier release that does not know such requests"),
    ],
)
def test_a_request_that_no_rank_takes_ends_after_a_time_with_what_is_known(of, phase, why):
    progress = {"step": 5, "totalSteps": 9, "updateTime": "2026-11-01T00:00:00Z", "phase": phase}
    watched = Watched(a_job("Running", checkpointRequest=of, progress=progress))
    with pytest.raises(CommandError, match=rf"no rank of dtj/digits has taken the request within 5 s: .*{why}"):
        watched.wait()


@pytest.mark.parametrize(
    ("phase", "why"),
    [
        (None, "its program has no `disttrain.session` that writes checkpoints"),
        ("Training", "its program has no `disttrain.session` that writes checkpoints"),
        ("Starting", "they have not begun to train"),
    ],
)
def test_a_program_without_a_session_takes_no_request(phase: str | None, why: str) -> None:
    job = a_job("Running", progress={"step": 5, "totalSteps": 9, "updateTime": WRITTEN["time"], "phase": phase})
    job.raw["spec"]["training"] = None
    with pytest.raises(CommandError, match=why):
        Watched(job).wait()


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        (a_job("Complete", "Finished", phase="Succeeded"), r"finished before it wrote one \(Succeeded\)"),
        (a_job("Suspended", suspend=True), "was suspended before it wrote one: after `disttrain resume digits`"),
        (a_job("Running", uid="another"), "was deleted and recreated before it wrote a checkpoint: ask again"),
    ],
)
def test_a_job_that_comes_to_an_end_meanwhile_is_a_sentence(last: RemoteJob, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        Watched(a_job("Running"), last).wait()


def test_the_checkpoint_of_a_job_that_is_suspended_or_finishes_is_as_good() -> None:
    stopping = a_job("Running", suspend=True)
    assert Watched(a_job("Running"), stopping, a_job("Suspended", suspend=True, checkpoint=WRITTEN)).wait() == (
        7,
        ["the job is being suspended: its pods write a checkpoint and stop"],
    )
    assert Watched(a_job("Running"), a_job("Complete", "Finished", checkpoint=WRITTEN)).wait() == (7, [])


def test_a_pod_that_is_replaced_alone_is_waited_for() -> None:
    watched = Watched(a_job("Running"), a_job(phase="Starting"), a_job("Running", checkpoint=WRITTEN))
    assert watched.wait() == (7, ["the job does not run (Starting): its ranks take the request once they train"])


def test_the_ranks_of_the_next_attempt_have_as_much_time_to_take_it() -> None:
    """Red where time runs for ranks that run the first time alone."""
    watched = Watched(a_job("Running"), a_job("Restarting", attempts=[ended(1)]), a_job("Running", attempt=2))
    with pytest.raises(CommandError, match="no rank of dtj/digits has taken the request within 5 s"):
        watched.wait()
