"""What is said of a rank that is asked for its stacks, by what the kernel says of its process, in a time of its own."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from disttrain_agent.environment import PodEnvironment, stacks_file
from disttrain_agent.look import Look
from disttrain_agent.output import RankOutput
from disttrain_agent.reports import Reports
from disttrain_api.names import STACKS_SIGNAL
from disttrain_api.stacks import STOPPED
from tests.unit.operator.clocked_loop import JumpingLoop

TEXT = 'Current thread 0x1 (most recent call first):\n  File "a.py", line 3 in f\n'
SILENT = "it does not answer: it is stopped, or the disk is full"


class Pod:
    """A pod with one rank, whose process and kernel a test plays. It is the pod's processes, too."""

    rank, pid, returncode, output = 0, 41, None, RankOutput(0)

    def __init__(self, folder: Path) -> None:
        pod = PodEnvironment(0, 1, "", None, folder, 1.0, {})
        pod.report_dir.mkdir()
        self.file = stacks_file(pod.report_dir, self.rank)
        self.file.touch()
        self.alive, self.stopped, self.signals = True, False, 0
        self.asked: Callable[[], object] = lambda: None
        """Happens as soon as the rank is asked."""
        self.ranks = [self]
        self.look = Look(
            pod,
            self,
            Reports(pod.report_dir, [0]),
            send=self.send,
            is_stopped=lambda pid: pid == self.pid and self.stopped,
        )

    def send(self, pid: int, number: int) -> None:
        assert (pid, number) == (self.pid, STACKS_SIGNAL)
        self.signals += 1
        self.asked()

    def write(self, text: str) -> None:
        with self.file.open("a") as file:
            file.write(text)

    def stop(self) -> None:
        self.stopped = True

    def end(self) -> None:
        self.alive = False


def after(seconds: float, what: Callable[..., object], *arguments: object) -> None:
    asyncio.get_running_loop().call_later(seconds, what, *arguments)


def said(pod: Pod) -> tuple[str, float]:
    """What the agent says of the rank, and the seconds until it does."""

    loop = JumpingLoop()
    began = loop.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(pod.look.stacks())
    return found["0"], round(loop.now - began, 2)


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_a_rank_that_answers_is_waited_for_until_it_writes_no_more(pod: Pod) -> None:
    pod.asked = lambda: (after(0.01, pod.write, TEXT[:9]), after(0.06, pod.write, TEXT[9:]))
    assert said(pod) == (TEXT, 0.15)


def test_a_rank_that_is_stopped_is_not_asked(pod: Pod) -> None:
    pod.stop()
    assert (said(pod), pod.signals) == ((STOPPED, 0.0), 0)


@pytest.mark.parametrize("written", ["", TEXT[:9]], ids=["nothing", "a part"])
def test_a_rank_that_a_signal_stops_only_after_it_was_asked_is_stopped_and_not_waited_for(
    pod: Pod, written: str
) -> None:
    """A process stops when it is given a processor next. Red where the kernel is asked beforehand alone, or where
    what a stopped rank has written so far is taken for its stacks."""
    pod.asked = lambda: (pod.write(written), after(0.07, pod.stop))
    assert said(pod) == (STOPPED, 0.1)


def test_a_rank_that_neither_answers_nor_is_stopped_is_given_two_seconds(pod: Pod) -> None:
    assert said(pod) == (SILENT, 2.0)


def test_a_rank_that_ends_is_not_waited_for(pod: Pod) -> None:
    pod.asked = lambda: after(0.07, pod.end)
    assert said(pod) == (SILENT, 0.1)
    assert said(pod) == ("it has ended", 0.0)
