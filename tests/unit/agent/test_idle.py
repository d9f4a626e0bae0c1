"""For how long a rank has shown no sign that it gets on: in a time of its own, and of real processes."""

import os
import signal
import subprocess
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from disttrain_agent.idle import LOOK_SECONDS as WORK_SECONDS
from disttrain_agent.step_clock import FIGURES, LOOK_SECONDS, StepClock, step_times_file
from disttrain_agent.work import Work, Works
from disttrain_api.report import Idle, RankPhase
from disttrain_trainer.runtime.step_times import StepTimes
from tests.waiting import until

NOTHING = Work(1.0, 0.0, 100, has_gpu=False)


class Run:
    """A rank that writes what it does, and the clock that looks at it, in a time of their own."""

    def __init__(self, folder: Path) -> None:
        self.now, self.folder = 0.0, folder
        self.work: Work | None = NOTHING
        self.times = StepTimes(0, folder, lambda: self.now)
        self.clock = StepClock(folder, [0], lambda: self.now, lambda process: self.work)

    def wait(self, seconds: float, *, each: Work | None = None) -> None:
        """Let time pass in which the agent looks. each: done in each second."""
        end = self.now + seconds
        while self.now < end - 1e-6:
            self.now = min(end, self.now + LOOK_SECONDS)
            if each is not None and self.work is not None:
                own, others, bytes_ = (
                    now + LOOK_SECONDS * more for now, more in zip(self.work, each[:3], strict=False)
                )
                self.work = Work(own, others, bytes_, has_gpu=each.has_gpu)
            self.clock.look()

    @property
    def idle(self) -> Idle | None:
        return self.clock.idle(0)

    @property
    def said(self) -> tuple[RankPhase, float, float | None]:
        """To a look."""
        found = self.idle
        assert found is not None
        longest = found.longest_seconds
        return found.phase, round(found.seconds, 1), longest and round(longest, 1)

    @property
    def seconds(self) -> float:
        found = self.idle
        assert found is not None
        return round(found.seconds, 1)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_before_a_rank_has_written_anything_nothing_is_known(run: Run) -> None:
    run.wait(100.0)
    assert run.idle is None


def test_a_batch_a_phase_and_a_step_are_signs(run: Run) -> None:
    run.times.begin(RankPhase.STARTING)
    run.wait(20.0)
    assert run.said == (RankPhase.STARTING, 19.9, None)
    run.times.begin(RankPhase.TRAINING)
    with run.times.counted():
        run.wait(20.0)
        run.times.stepped()
        run.wait(10.0)
        assert run.seconds == 9.9
    with run.times.during(RankPhase.EVALUATING):
        run.wait(20.0)
        run.times.moved()
        run.wait(10.0)
        assert run.said == (RankPhase.EVALUATING, 9.9, None)
    run.wait(10.0)
    assert run.said == (RankPhase.TRAINING, 9.9, 20.0)


def test_the_longest_pause_of_a_phase_is_known_once_it_was_over(run: Run) -> None:
    for longest in (None, 20.0, 40.0):
        with run.times.during(RankPhase.EVALUATING):
            run.wait(2.0)
            assert run.said == (RankPhase.EVALUATING, 1.9, longest)
            run.wait(18.0 if longest is None else 38.0)
        run.wait(5.0)


@pytest.mark.parametrize(
    ("each", "moves"),
    [
        (Work(0.01, 0.0, 0, has_gpu=False), False),
        (Work(0.05, 0.0, 0, has_gpu=False), True),
        (Work(0.0, 0.05, 0, has_gpu=False), True),
        (Work(1.0, 0.0, 0, has_gpu=True), False),
        (Work(0.0, 0.05, 0, has_gpu=True), True),
        (Work(0.0, 0.0, 10_000, has_gpu=False), False),
        (Work(0.0, 0.0, 40_000, has_gpu=False), True),
    ],
    ids=["waiting", "computing", "a worker computes", "waiting for a GPU", "its worker", "heartbeats", "a slow disk"],
)
def test_what_processes_do_is_a_sign_where_it_is_more_than_waiting(run: Run, each: Work, moves: bool) -> None:
    with run.times.during(RankPhase.SAVING):
        run.wait(1000.0, each=each)
        assert (run.seconds < 60.0) is moves
        assert moves or run.seconds == pytest.approx(1000.0, abs=1.0)


def test_while_a_rank_starts_its_own_time_counts_also_with_a_gpu(run: Run) -> None:
    run.times.begin(RankPhase.STARTING)
    run.wait(1000.0, each=Work(1.0, 0.0, 0, has_gpu=True))
    assert run.seconds < 60.0


def test_a_process_below_it_that_ends_is_a_sign(run: Run) -> None:
    run.work = Work(1.0, 50.0, 100, has_gpu=False)
    with run.times.during(RankPhase.SAVING):
        run.wait(100.0)
        run.work = NOTHING
        run.wait(2 * WORK_SECONDS)
        assert run.seconds <= 2 * WORK_SECONDS


def test_where_nobody_knows_what_a_process_does_nothing_is_said(run: Run) -> None:
    run.work = None
    with run.times.during(RankPhase.SAVING):
        run.wait(1000.0)
        assert run.idle is None


def test_the_time_in_which_the_agent_was_stopped_does_not_count(run: Run) -> None:
    with run.times.during(RankPhase.SAVING):
        run.wait(20.0)
        run.now += 3600.0
        run.clock.look()
        assert run.seconds < 21.0


def test_another_process_of_the_rank_begins_anew(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.times.begin(RankPhase.STARTING)
    run.wait(100.0)
    monkeypatch.setattr(os, "getpid", lambda: 12345)
    run.times = StepTimes(0, run.folder, lambda: run.now)
    run.times.begin(RankPhase.STARTING)
    run.wait(10.0)
    assert run.said == (RankPhase.STARTING, 9.9, None)


@pytest.mark.parametrize("figure", [-1.0, 5.0, 1.5, float("nan")])
def test_a_rank_that_says_something_else_says_nothing(run: Run, figure: float) -> None:
    figures = array("d", bytes(8 * FIGURES))
    figures[0], figures[2] = 1.0, figure
    step_times_file(run.folder, 0).write_bytes(figures.tobytes())
    run.wait(1.0)
    assert run.idle is None


@contextmanager
def a_program(text: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", text, *arguments], process_group=0) as process:
        try:
            yield process
        finally:
            # With what it has started.
            os.killpg(process.pid, signal.SIGKILL)


BELOW = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
COMPUTES = "while True: pass"
WRITES = """
import sys, time
with open(sys.argv[1], "wb", buffering=0) as file:
    for _ in range(64):
        file.write(bytes(65536))
time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_what_real_processes_do_is_counted(tmp_path: Path) -> None:
    now = [0.0]
    works = Works(lambda: now[0])

    def of(process: subprocess.Popen[bytes]) -> Work:
        now[0] += 10.0
        found = works.of(process.pid)
        assert found is not None
        return found

    with a_program(COMPUTES) as own:
        until(lambda: of(own).own_seconds > 0.5)
        assert of(own).others_seconds == 0
        assert not of(own).has_gpu
    with a_program(BELOW, COMPUTES) as above:
        until(lambda: of(above).others_seconds > 0.5)
        assert of(above).own_seconds < 0.5
    with a_program(WRITES, str(tmp_path / "file")) as writer:
        until(lambda: of(writer).bytes > 64 * 65536)
    assert works.of(2**30) is None
