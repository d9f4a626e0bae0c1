"""What is said of a rank that is asked for its stacks, by what the kernel says of its process, in a time of its own."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disttrain_agent.collectives import answered_collectives, ask_for_collectives
from disttrain_agent.environment import (
    PodEnvironment,
    collectives_file,
    collectives_pipe,
    stacks_file,
    threads_file,
)
from disttrain_agent.look import MAX_STACKS_BYTES, Look
from disttrain_agent.output import RankOutput
from disttrain_agent.reports import Reports
from disttrain_api.flight_recorder import Collective, lines_of
from disttrain_api.names import STACKS_SIGNAL
from disttrain_api.stacks import MAX_STACKS_ANSWER_BYTES, MAX_WHOLE_STACKS_BYTES, STOPPED
from tests.unit.operator.clocked_loop import JumpingLoop
from tests.waiting import until

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


def said(pod: Pod, *, main: bool = False) -> tuple[str, float]:
    """What the agent says of the rank, and the seconds until it does."""

    loop = JumpingLoop()
    began = loop.now
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        found = runner.run(pod.look.stacks(main=main))
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


CALLS = lines_of([Collective("0", "", 4, "gloo:all_reduce", "8", pending=True)])


@pytest.fixture
def recorder(pod: Pod) -> Iterator[Path]:
    """The file of a rank that can be asked for its collective calls, too, and answers for its stacks at once."""
    folder = pod.file.parent
    os.mkfifo(collectives_pipe(folder, pod.rank))
    pipe = os.open(collectives_pipe(folder, pod.rank), os.O_RDWR)
    pod.asked = lambda: pod.write(TEXT)
    yield collectives_file(folder, pod.rank)
    os.close(pipe)


def test_the_last_collective_calls_stand_below_the_stacks(pod: Pod, recorder: Path) -> None:
    recorder.write_text("of a former question")
    pod.asked = lambda: (pod.write(TEXT), after(0.2, recorder.write_text, f"{CALLS}\n  odd\n"))
    for main in (False, True):
        assert said(pod, main=main) == (f"{TEXT.rstrip()}\n\n{CALLS}", 0.2)


OTHER = 'Thread 0x2 (most recent call first):\n  File "b.py", line 7 in g'


def test_the_other_threads_stand_between_the_main_one_and_the_collective_calls(pod: Pod, recorder: Path) -> None:
    """faulthandler calls a thread that answers for itself alone another name than beside all others."""
    threads = threads_file(recorder.parent, pod.rank)
    threads.write_text("of a former question")
    pod.asked = lambda: (
        pod.write(TEXT.replace("Current thread ", "Stack ")),
        threads.write_text(OTHER),
        recorder.write_text(CALLS),
    )
    assert said(pod)[0] == f"{TEXT.rstrip()}\n\n{OTHER}\n\n{CALLS}"
    assert said(pod, main=True)[0] == f"{TEXT.rstrip()}\n\n{CALLS}"


@pytest.mark.parametrize("ranks", [1, 16], ids=["one rank", "many ranks share what is read of a pod's answer"])
def test_the_stacks_of_many_threads_fit_into_the_answer(pod: Pod, recorder: Path, ranks: int) -> None:
    threads = threads_file(recorder.parent, pod.rank)
    pod.asked = lambda: (pod.write(TEXT), threads.write_text("t" * MAX_WHOLE_STACKS_BYTES), recorder.write_text(CALLS))
    pod.ranks = [pod] * ranks
    text, _ = said(pod)
    assert text.startswith(TEXT)
    assert text.endswith(CALLS)
    assert len(json.dumps({"stacks": {str(rank): text for rank in range(ranks)}})) < MAX_WHOLE_STACKS_BYTES
    most = min(MAX_STACKS_BYTES, MAX_WHOLE_STACKS_BYTES // (2 * ranks))
    assert len(text) == most + len("\n") + len(f"\n\n{CALLS}")


def test_a_rank_that_runs_no_python_gives_its_stacks_alone(pod: Pod, recorder: Path) -> None:
    recorder.write_text(CALLS)
    assert said(pod) == (TEXT, 0.55), "a former answer is not taken for one"


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")], ids=range(3))
def test_whatever_a_rank_puts_in_the_place_of_its_calls_holds_nobody_up(
    pod: Pod, recorder: Path, make: Callable[[Path], object]
) -> None:
    pod.asked = lambda: (pod.write(TEXT), make(recorder))
    text, seconds = said(pod)
    assert text == TEXT
    assert seconds < 1


def test_collective_calls_give_way_where_the_answer_would_not_be_read(
    pod: Pod, recorder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.asked = lambda: (pod.write(TEXT), recorder.write_text(CALLS))
    monkeypatch.setattr("disttrain_agent.look.MAX_STACKS_ANSWER_BYTES", 150)
    assert len(TEXT) < 150 < len(TEXT + CALLS) < MAX_STACKS_ANSWER_BYTES
    assert (said(pod, main=True)[0], said(pod)[0]) == (TEXT.rstrip(), f"{TEXT.rstrip()}\n\n{CALLS}")


_RANK = """
import json, sys, types
from pathlib import Path
from disttrain_agent.collectives import answer_for_collectives

def fails():
    raise RuntimeError

entry = {"collective_seq_id": 3, "is_p2p": False, "input_sizes": [], "process_group": ["0", ""], "retired": False}
entry |= {"profiling_name": "nccl:barrier", "state": "started"}
modules = [
    types.SimpleNamespace(),
    types.SimpleNamespace(_dump_fr_trace_json=fails, _dump_nccl_trace_json=lambda: json.dumps({"entries": [entry]})),
]
answer_for_collectives(2, Path(sys.argv[1]))
for module in (None, *modules):
    sys.modules["torch._C._distributed_c10d"] = module
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_rank_answers_by_what_its_torch_has(tmp_path: Path) -> None:
    """Without torch, with a version that has no recorder, and where one of two recorders fails."""
    rank = [sys.executable, "-c", _RANK, str(tmp_path)]
    said = []
    with subprocess.Popen(rank, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for _ in range(3):
            assert process.stdout.readline() == b"ready\n"
            assert ask_for_collectives(2, tmp_path)
            until(lambda: answered_collectives(2, tmp_path) is not None, lambda: "it answers")
            said.append(answered_collectives(2, tmp_path))
            process.stdin.write(b"\n")
            process.stdin.flush()
    assert said == [[], [], [Collective("0", "", 3, "nccl:barrier", "", pending=True)]]
    assert not ask_for_collectives(2, tmp_path), "nobody is there"
