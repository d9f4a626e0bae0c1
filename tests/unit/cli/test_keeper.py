"""The keeper of a local pod, by itself. Hidden processes are looked for in tests/local."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from disttrain.local import keeper
from tests.waiting import GENEROUS

Process = subprocess.Popen[bytes]
Start = Callable[..., Process]


@pytest.fixture
def program() -> Iterator[Start]:
    """Starts a program."""
    started: list[Process] = []

    def begin(*command: str) -> Process:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start(program: Start) -> Start:
    """Starts a keeper of a command."""
    return partial(program, sys.executable, "-I", "-S", keeper.__file__)


@pytest.fixture
def shell(start: Start) -> Start:
    """Starts a keeper of a shell's script."""
    return partial(start, "/bin/sh", "-c")


def until_ready(process: Process) -> None:
    assert process.stdout.readline() == b"ready\n"


def order(process: Process, letter: bytes) -> None:
    process.stdin.write(letter)
    process.stdin.flush()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 81", 81), ("kill -9 $$", 137), ("kill -11 $$", 139)]
)
def test_it_ends_as_its_command_does(shell: Start, script: str, code: int) -> None:
    assert shell(script).wait(GENEROUS) == code


def test_a_command_that_cannot_be_executed_says_so(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "data.txt"
    file.write_text("no program")
    process = start(str(file))
    assert process.wait(GENEROUS) == 127
    assert process.stdout.read().decode() == f"cannot execute {file}: Permission denied\n"


def test_sigterm_is_passed_on(shell: Start) -> None:
    process = shell("trap 'exit 42' TERM; echo ready; while :; do sleep 0.01; done")
    until_ready(process)
    order(process, b"T")
    assert process.wait(GENEROUS) == 42


# A signal that comes in the first moment of a fork, when it still has the handlers of its parent.
AT_ONCE = """
import os, signal, sys
from disttrain.local import keeper, fork_server

plain = os.fork

def fork():
    pid = plain()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = fork
"""
KEEPS = """
sys.exit(keeper.keep(lambda: os._exit(0), "nothing"))
"""
FORKS_A_RANK = """
signal.signal(signal.SIGTERM, lambda *_: None)
rank = fork_server.fork_rank(["python", "-P", "-m", "this"], {"RANK": "0"})
_, status = os.waitpid(rank.pid, 0)
sys.exit(128 - os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("parent", [KEEPS, FORKS_A_RANK], ids=["keeper", "agent"])
def test_a_sigterm_at_the_first_moment_is_not_lost(program: Start, parent: str) -> None:
    # The pipe stays open: at its end a keeper kills.
    assert program(sys.executable, "-c", AT_ONCE + parent).wait(GENEROUS) == 143


def test_a_kill_needs_no_consent(shell: Start) -> None:
    process = shell("trap '' TERM; echo ready; while :; do sleep 0.01; done")
    until_ready(process)
    order(process, b"TK")
    assert process.wait(GENEROUS) == 137


def test_without_its_runner_it_ends_everything(shell: Start) -> None:
    process = shell("trap '' TERM; sleep 1000 & echo ready; wait; sleep 1000")
    until_ready(process)
    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 2
    process.stdin.close()
    assert process.wait(GENEROUS) == 137
    assert not [each for each in below if each.is_running()]


def test_what_a_command_leaves_behind_ends_with_it(shell: Start) -> None:
    process = shell("setsid sleep 1000 & echo $!; exit 3")
    left = int(process.stdout.readline())
    assert process.wait(GENEROUS) == 3
    assert not psutil.pid_exists(left)


def test_its_command_does_not_outlive_a_killed_keeper(shell: Start) -> None:
    process = shell("echo ready; while :; do sleep 0.01; done")
    until_ready(process)
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    child.wait(GENEROUS)
