"""Lines of a run without a terminal."""

import io

from disttrain.local.progress import LiveProgress
from disttrain.local.view import PlainView
from disttrain_api.status import JobStatus, Phase
from disttrain_operator.decide.decision import Event


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def a_view() -> tuple[PlainView, Clock, io.StringIO]:
    clock, stream = Clock(), io.StringIO()
    return PlainView("digits", clock, stream), clock, stream


def test_progress_is_said_every_few_seconds_and_at_the_last_step() -> None:
    view, clock, stream = a_view()
    for step in range(0, 101, 10):
        clock.now += 1
        view.progress(LiveProgress(step, 100, 1 / (step + 1), 1234.5))
    assert stream.getvalue() == (
        "00:05 digits: step 40/100  loss 0.02439  1,234 samples/s\n"
        "00:10 digits: step 90/100  loss 0.01099  1,234 samples/s\n"
        "00:11 digits: step 100/100  loss 0.009901  1,234 samples/s\n"
    )


def test_a_checkpoint_with_more_steps_than_the_job_is_no_fraction_of_them() -> None:
    view, _, stream = a_view()
    view.progress(LiveProgress(9, 3, 0.5, None))
    assert stream.getvalue() == "00:00 digits: step 9 (past 3)  loss 0.5\n"


def test_a_phase_is_said_once_and_warnings_are_said() -> None:
    view, clock, stream = a_view()
    running = JobStatus(phase=Phase.RUNNING, attempt=1)
    view.status(running)
    view.status(running)
    view.event(Event("AllPodsRunning", "all 2 pods run"))
    clock.now += 75
    view.event(Event("GangRestarted", "rank 1 was killed; attempt 2 begins", warning=True))
    view.status(JobStatus(phase=Phase.RESTARTING, attempt=2, restarts=1))
    assert stream.getvalue() == (
        "00:00 digits: Running  attempt 1\n"
        "01:15 digits: GangRestarted: rank 1 was killed; attempt 2 begins\n"
        "01:15 digits: Restarting  attempt 2  restarts 1\n"
    )
