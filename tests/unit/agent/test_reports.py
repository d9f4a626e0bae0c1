"""How long a rank has done no step, by its agent's clock."""

from datetime import UTC, datetime
from pathlib import Path

from disttrain_agent.reports import Reports, TerminationMessage, report_path
from disttrain_api.report import CheckpointReport, RankFailure, RankPhase, RankReport
from disttrain_trainer.runtime.files import rewrite


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def run(self, until: float, reports: Reports) -> None:
        """Let time pass in which the agent looks now and then, as it does while ranks run."""
        while self.now < until:
            self.now = min(until, self.now + 2)
            reports.of(0)


def test_time_without_a_step_begins_anew_after_an_evaluation(tmp_path: Path) -> None:
    clock = Clock()
    reports = Reports(tmp_path, [0], clock)

    def says(at: float, step: int, phase: RankPhase) -> float | None:
        clock.run(at, reports)
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
    clock.run(30.0, reports)
    assert (reports.seconds_since_step(0), reports.seconds_since_step(1)) == (30.0, None)


def test_the_time_of_a_step_is_that_of_its_first_report(tmp_path: Path) -> None:
    minutes = iter(range(60))
    reports = Reports(tmp_path, [0], now=lambda: datetime(2026, 1, 1, 12, next(minutes), tzinfo=UTC))

    def says(**fields: object) -> str | None:
        rewrite(report_path(tmp_path, 0), RankReport(rank=0, **fields).model_dump_json(by_alias=True))
        found = reports.of(0)
        assert found is not None
        assert found.step == fields.get("step", 0)
        return found.step_time

    assert says() is None
    assert says(step=20) is None, "it resumes there"
    assert says(step=20, phase=RankPhase.TRAINING) is None
    assert says(step=30, phase=RankPhase.TRAINING, loss=0.7) == "2026-01-01T12:00:00Z"
    assert says(step=30, phase=RankPhase.SAVING, loss=0.7) == "2026-01-01T12:00:00Z"
    assert says(step=40, phase=RankPhase.TRAINING, loss=0.7) == "2026-01-01T12:01:00Z"
    assert says(step=50) == "2026-01-01T12:02:00Z", "a program of one's own may say nothing else"
    reports.begin_again()
    assert reports.progress().step_time == "2026-01-01T12:02:00Z"
    assert says(step=50) is None
    assert says(step=60, loss=0.7) == "2026-01-01T12:03:00Z"


def test_time_in_which_the_agent_was_stopped_is_not_time_without_a_step(tmp_path: Path) -> None:
    """What stops an agent, such as a frozen machine, stops the ranks beside it. They need a while to log a step."""
    clock = Clock()
    reports = Reports(tmp_path, [0], clock)
    rewrite(report_path(tmp_path, 0), RankReport(rank=0, step=20, loss=0.7).model_dump_json(by_alias=True))
    reports.of(0)
    clock.run(40.0, reports)
    clock.now += 1000.0
    reports.of(0)
    assert reports.seconds_since_step(0) == 40.0
    clock.run(1050.0, reports)
    clock.now += 500.0
    assert reports.seconds_since_step(0) == 50.0


def test_another_life_of_the_ranks_begins_without_reports_and_with_the_newest_checkpoint(tmp_path: Path) -> None:
    clock, saved = Clock(), CheckpointReport(step=20, path="/c/20", time="2026-01-01T12:00:00Z")
    reports = Reports(tmp_path, [0, 1], clock)
    reports.prepare()

    def says(**fields: object) -> RankReport | None:
        report = RankReport.model_validate({"rank": 0, "total_steps": 90, **fields})
        rewrite(report_path(tmp_path, 0), report.model_dump_json(by_alias=True))
        return reports.of(0)

    says(step=20, loss=0.7, checkpoint=saved)
    says(step=25, loss=0.6, checkpoint=saved, error={"exitCode": 1, "reason": "RankFailed", "message": "no"})
    assert (reports.kept.checkpoint, reports.seconds_since_step(0)) == (20, 0.0)
    reports.begin_again()
    assert (reports.of(0), reports.seconds_since_step(0), reports.kept.checkpoint) == (None, None, 20)
    last = reports.progress()
    assert (last.step, last.checkpoint, last.error) == (25, saved, None), "the termination message keeps what is known"
    clock.run(50.0, reports)
    assert says(step=20) == RankReport(rank=0, step=20, total_steps=90, checkpoint=saved)
    assert reports.progress() == reports.of(0)
    assert reports.seconds_since_step(0) is None, "it has done no step yet"
    newer = saved.model_copy(update={"step": 30})
    says(step=30, loss=0.5, checkpoint=newer)
    assert (reports.kept.checkpoint, reports.seconds_since_step(0)) == (30, 0.0)


def test_a_failure_that_is_over_leaves_the_termination_message(tmp_path: Path) -> None:
    """Ranks that start again may fail before their first report, and their pod may be killed then."""
    path = tmp_path / "termination-log"
    message = TerminationMessage(path)
    message.write(None)
    assert path.read_text() == ""
    message.write(None, RankFailure(rank=1, exit_code=137, signal=9))
    assert "137" in path.read_text()
    message.write(None)
    assert path.read_text() == ""
