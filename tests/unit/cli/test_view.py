"""Lines of a run without a terminal."""

import io
import re

import pytest

from disttrain.local.progress import LiveProgress
from disttrain.local.view import PlainView, TerminalView
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


def test_progress_is_reported_every_few_seconds_and_at_the_last_step() -> None:
    view, clock, stream = a_view()
    for step in range(0, 101, 10):
        clock.now += 1
        view.progress(LiveProgress(step, 100, 1 / (step + 1), 1234.5))
    assert stream.getvalue() == (
        "00:05 digits: step 40/100  loss 0.02439  1,234 samples/s\n"
        "00:10 digits: step 90/100  loss 0.01099  1,234 samples/s\n"
        "00:11 digits: step 100/100  loss 0.009901  1,234 samples/s\n"
    )


def test_the_time_that_is_left_is_reported_where_it_is_known() -> None:
    view, _, stream = a_view()
    view.progress(LiveProgress(100, 100, 0.5, 10, remaining_seconds=0.0))
    view.progress(LiveProgress(100, 99, 0.5, 10, remaining_seconds=250.0))
    assert [line.partition("samples/s")[2] for line in stream.getvalue().splitlines()] == ["", "  4m left"]


@pytest.mark.parametrize("columns", ["40", "60", "200"])
def test_the_bar_is_one_line_on_a_narrow_terminal_too(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    stream = io.StringIO()
    monkeypatch.setattr("disttrain.local.view.standard_error", lambda: stream)
    view = TerminalView("a-name-that-is-rather-long-for-a-job")
    view.status(JobStatus(phase=Phase.RUNNING, attempt=2, restarts=1))
    view.progress(LiveProgress(123_456, 1_000_000, 0.123, 123_456.0, remaining_seconds=123_456.0))
    with view:
        pass
    shown = re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", stream.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", shown) if line.strip()]
    assert len(set(lines)) == 1, lines
    assert ("34h17m left" in lines[0]) == (columns == "200")


def test_a_checkpoint_with_more_steps_than_the_job_is_no_fraction_of_them() -> None:
    view, _, stream = a_view()
    view.progress(LiveProgress(9, 3, 0.5, None))
    assert stream.getvalue() == "00:00 digits: step 9 (past 3)  loss 0.5\n"


def test_a_phase_is_reported_once_and_warnings_are_reported() -> None:
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
