"""How long a rank has done no step, by its agent's clock."""

from pathlib import Path

from disttrain_agent.reports import Reports, report_path
from disttrain_api.report import RankPhase, RankReport
from disttrain_trainer.runtime.files import rewrite


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_without_a_step_begins_anew_after_an_evaluation(tmp_path: Path) -> None:
    clock = Clock()
    reports = Reports(tmp_path, [0], clock)

    def says(at: float, step: int, phase: RankPhase) -> float | None:
        clock.now = at
        rewrite(report_path(tmp_path, 0), RankReport(rank=0, step=step, phase=phase).model_dump_json(by_alias=True))
        reports.of(0)
        return reports.seconds_since_step(0)

    assert says(0, 0, RankPhase.STARTING) is None
    assert says(50, 0, RankPhase.TRAINING) is None, "the first step may have to be compiled"
    assert says(90, 10, RankPhase.TRAINING) == 0
    assert says(95, 10, RankPhase.TRAINING) == 5
    assert says(96, 10, RankPhase.EVALUATING) == 0
    assert says(900, 10, RankPhase.EVALUATING) == 804
    assert says(901, 10, RankPhase.TRAINING) == 0
    assert says(931, 10, RankPhase.TRAINING) == 30


def test_a_step_that_was_logged_before_anybody_looked_counts(tmp_path: Path) -> None:
    """A rank may hang right after it. One that resumes at a step has not done any yet."""
    clock = Clock()
    done, resumed = RankReport(rank=0, step=20, loss=0.7), RankReport(rank=1, step=20)
    reports = Reports(tmp_path, [0, 1], clock)
    for report in (done, resumed):
        rewrite(report_path(tmp_path, report.rank), report.model_dump_json(by_alias=True))
        reports.of(report.rank)
    clock.now = 30.0
    assert (reports.seconds_since_step(0), reports.seconds_since_step(1)) == (30.0, None)
