"""Seconds of a rank's phases, as its report has them."""

from contextlib import suppress
from pathlib import Path

import pytest

from disttrain_api.report import PhaseSeconds, RankPhase, RankReport
from disttrain_session.progress import SessionProgress
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.runtime.phase_clock import PhaseClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(PhaseClock.__init__, "__defaults__", (clock,))
    return clock


def of(seconds: PhaseSeconds | None) -> tuple[float, float, float]:
    assert seconds is not None
    return seconds.restoring, seconds.evaluating, seconds.saving


def test_a_phase_counts_once_it_is_over(clock: Clock) -> None:
    phases = PhaseClock(clock)
    found = []
    for phase, lasts in (("Restoring", 4), ("Training", 50), ("Saving", 2), ("Training", 9), ("Saving", 3), (None, 1)):
        found.append(of(phases.enter(phase)))
        clock.now += lasts
    assert found == [(0, 0, 0), (4, 0, 0), (4, 0, 0), (4, 0, 2), (4, 0, 2), (4, 0, 5)]
    assert len({phases.enter(phase).began for phase in (None, "Training")}) == 1


def test_a_phase_that_goes_on_is_one(clock: Clock) -> None:
    phases = PhaseClock(clock)
    for _ in range(3):
        phases.enter("Evaluating")
        clock.now += 5
    assert of(phases.enter("Training")) == (0, 15, 0)


def test_the_trainers_report_has_them(clock: Clock, tmp_path: Path) -> None:
    reporter = Reporter(0, tmp_path)
    reporter.update(phase=RankPhase.RESTORING)
    clock.now += 3
    reporter.follow(lambda: 0)
    clock.now += 20
    with suppress(ValueError), reporter.during(RankPhase.EVALUATING):
        clock.now += 6
        raise ValueError("it fails")
    with reporter.during(RankPhase.SAVING):
        clock.now += 1
        saving = reporter.report
    written = RankReport.model_validate_json((tmp_path / "rank-0.json").read_text())
    assert of(saving.phase_seconds) == (3, 6, 0)
    assert (written.phase, of(written.phase_seconds)) == (RankPhase.TRAINING, (3, 6, 1))


def test_a_sessions_report_has_them(clock: Clock) -> None:
    progress = SessionProgress(10)
    progress.restores()
    clock.now += 3
    progress.resumed(0, None)
    with progress.saving():
        clock.now += 2
    assert of(progress.report.phase_seconds) == (3, 0, 2)
