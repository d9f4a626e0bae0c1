"""How long a rank has done no step, by its own steps' times: through compilation, pauses, freezes and restarts."""

from array import array
from pathlib import Path

import pytest

from disttrain_agent.reports import Reports
from disttrain_agent.step_clock import (
    FIGURES,
    KEPT_STEPS,
    LEAST_STEPS,
    LIFE,
    LOOK_SECONDS,
    StepClock,
    step_times_file,
)
from disttrain_api.report import StepPace
from disttrain_trainer.runtime.step_times import StepTimes


class Run:
    """A rank that writes the times of its steps, and the clock that looks at them, in a time of their own."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 0.0, folder
        self.times = StepTimes(0, folder, lambda: self.now)
        self.clock = StepClock(folder, [0], lambda: self.now)

    def wait(self, seconds: float) -> None:
        """Let time pass in which the agent looks."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + LOOK_SECONDS)
            self.clock.look()

    def steps(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self.wait(seconds)
            self.times.stepped()
            self.clock.look()

    @property
    def pace(self) -> StepPace | None:
        return self.clock.pace(0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def pace(still: float, median: float, longest: float) -> StepPace:
    return StepPace(still_seconds=still, median_seconds=median, longest_seconds=longest)


def test_a_first_step_that_compiles_is_in_no_time_and_nothing_is_said_before_some_steps(run: Run) -> None:
    """Red without: the first step left out, the least number of steps."""
    with run.times.counted():
        run.steps(1, 300.0)
        run.steps(LEAST_STEPS - 1, 2.0)
        run.wait(500.0)
        assert run.pace is None
        run.times.stepped()
        run.steps(LEAST_STEPS, 2.0)
        run.wait(7.0)
        assert run.pace == pace(7.0, 2.0, 500.0)


def test_evaluations_and_saves_are_in_no_time_and_while_they_last_nothing_is_said(run: Run) -> None:
    """Red without: the begin of a block, its end, either of them as news to the agent."""
    for _ in range(4):
        with run.times.counted():
            run.steps(5, 1.0)
            assert run.pace is None or run.pace.still_seconds == 0.0
        run.wait(900.0)
        assert run.pace is None
    with run.times.counted():
        assert run.pace == pace(0.0, 1.0, 1.0)
        run.wait(3.0)
        assert run.pace == pace(3.0, 1.0, 1.0)


def test_steps_that_become_slower_are_measured_by_the_last_of_them(run: Run) -> None:
    with run.times.counted():
        run.steps(20, 1.0)
        run.steps(1, 90.0)
        for number in range(2 * KEPT_STEPS):
            run.steps(1, 1.0 + number / KEPT_STEPS)
            found = run.pace
            assert found is not None
            assert found.still_seconds == 0.0
            assert number >= KEPT_STEPS - 1 or found.longest_seconds == 90.0
    last = [1.0 + number / KEPT_STEPS for number in range(KEPT_STEPS, 2 * KEPT_STEPS)]
    assert found == pace(0.0, last[KEPT_STEPS // 2], last[-1])


@pytest.mark.parametrize("seconds", [30.0, 40_000.0])
def test_time_in_which_agent_and_ranks_were_stopped_is_not_time_without_a_step(run: Run, seconds: float) -> None:
    """A machine that is frozen, or all processes of a pod that get SIGSTOP and later SIGCONT. Red without the bound on
    the time between two looks."""
    with run.times.counted():
        run.steps(20, 2.0)
        run.wait(1.5)
        run.now += seconds
        found = run.pace
        assert found is not None
        assert found.still_seconds <= 2.0
        run.wait(0.5)
        run.times.stepped()
        found = run.pace
        assert found is not None
        assert (found.still_seconds, found.median_seconds) == (0.0, 2.0)


def test_ranks_that_are_stopped_alone_stand_still_until_they_go_on(run: Run) -> None:
    with run.times.counted():
        run.steps(20, 2.0)
        run.wait(100.0)
        assert run.pace == pace(100.0, 2.0, 2.0)
        run.steps(1, 1.0)
        assert run.pace == pace(0.0, 2.0, 101.0)


def test_another_life_of_a_rank_knows_nothing_of_the_former(run: Run) -> None:
    """Red without: the process among the figures, the file removed before the next life."""
    path = step_times_file(run.folder, 0)
    with run.times.counted():
        run.steps(20, 1.0)
        run.wait(50.0)
        assert run.pace == pace(50.0, 1.0, 1.0)
        figures = array("d", path.read_bytes())
        figures[LIFE] += 1
        path.write_bytes(figures)
        assert run.pace == pace(0.0, 1.0, 1.0)
        Reports(run.folder, [0]).prepare()
        assert run.pace is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 99,
        array("d", [0.0] * (FIGURES - 1)).tobytes(),
        array("d", [0.0] * (FIGURES + 1)).tobytes(),
        array("d", [1.0, 1.0, 1.0, float("nan"), *[1.0] * KEPT_STEPS]).tobytes(),
        array("d", [1.0, 1.0, 1.0, -1.0, *[1.0] * KEPT_STEPS]).tobytes(),
        array("d", [1.0, 1.0, 1.0, 50.0, *[float("nan"), float("inf"), -1.0] * KEPT_STEPS]).tobytes()[: 8 * FIGURES],
    ],
    ids=["empty", "no figures", "too short", "too long", "no count", "a negative count", "no times"],
)
def test_figures_that_no_trainer_writes_say_nothing(run: Run, data: bytes) -> None:
    step_times_file(run.folder, 0).write_bytes(data)
    assert run.pace is None


def test_any_count_of_steps_is_of_the_last_ones(run: Run) -> None:
    many = array("d", [1.0, 1.0, 1.0, float("inf"), *[3.0] * KEPT_STEPS])
    step_times_file(run.folder, 0).write_bytes(many)
    assert run.pace == pace(0.0, 3.0, 3.0)


def test_a_rank_without_a_place_for_them_trains_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file"):
        times = StepTimes(0, folder)
        with times.counted():
            times.stepped()
        times.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
