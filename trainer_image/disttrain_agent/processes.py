"""The ranks of a pod as processes: start, signal, reap, read. It decides nothing."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.output import RankOutput
from disttrain_agent.parent import ON_LINUX, die_with, libc

_PR_SET_CHILD_SUBREAPER = 36
_READ_BYTES = 64 * 1024


class Child(Protocol):
    """The part of `subprocess.Popen` that is used."""

    pid: int
    returncode: int | None
    stdout: IO[bytes] | None


Start = Callable[[Sequence[str], dict[str, str]], Child]
"""Starts a command in an environment: a child of ours, with nothing to read, in a process group of its own, that dies
with us; what it says on both its outputs is in `stdout`. Raises OSError."""


def execute(command: Sequence[str], environment: dict[str, str]) -> Child:
    """The Start of a program of its own."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A group of its own: it can be killed with its children, and a terminal's Ctrl-C reaches the agent alone.
        process_group=0,
        # It makes two system calls, by what is loaded already: where ranks start again, the agent may have threads.
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509
    )


class RankProcess:
    """One rank. `returncode` is None while it runs, negative where a signal ended it, as in `subprocess`."""

    def __init__(
        self, rank: int, command: Sequence[str], environment: dict[str, str], start: Start, *, alone: bool = True
    ) -> None:
        """alone: whether it is a rank and not a program that has several."""
        self.rank = rank
        self.output = RankOutput(rank if alone else None)
        self.signaled = False
        """Whether it was sent a signal before it ended, for another one's failure or since the pod ends."""
        self.hung = False
        """Whether it was killed since it, or its gang, hangs."""
        self._child = start(command, environment)
        assert self._child.stdout is not None
        self._pipe = self._child.stdout.fileno()
        os.set_blocking(self._pipe, False)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        return self._child.returncode

    @property
    def alive(self) -> bool:
        return self._child.returncode is None

    def terminate(self) -> None:
        """SIGTERM to the rank alone: its children (data loaders) are its own to stop."""
        if self.alive:
            self.signaled = True
            os.kill(self.pid, signal.SIGTERM)

    def kill(self, *, hung: bool = False) -> None:
        """SIGKILL to the rank and its children. hung: that is the first failure of its pod."""
        if self.alive:
            self.signaled, self.hung = self.signaled or not hung, hung
            os.killpg(self.pid, signal.SIGKILL)

    def ended(self, status: int) -> None:
        """It was reaped with this wait status."""
        self._child.returncode = os.waitstatus_to_exitcode(status)
        # Children that it left behind, for example data loaders of a rank that was killed.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def read(self) -> bool:
        """Pass on what it printed; False at the end of its output."""
        try:
            data = os.read(self._pipe, _READ_BYTES)
        except BlockingIOError:
            return True
        self.output.feed(data)
        return bool(data)

    def close(self) -> None:
        """Pass on what is still in the pipe. Orphans may hold its other end, so its end is not waited for."""
        assert self._child.stdout is not None
        if self._child.stdout.closed:
            return
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._pipe, _READ_BYTES):
                self.output.feed(data)
        self.output.finish()
        self._child.stdout.close()


class Processes:
    """All ranks of the pod, and whatever else is this process's child by being an orphan of its pod."""

    def __init__(self, on_end: Callable[[RankProcess], None]) -> None:
        self.ranks: list[RankProcess] = []
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGCHLD, self.reap)

    def start(
        self, pod: PodEnvironment, command: Sequence[str], start: Start, generation: int = 0,
        master_port: int | None = None, master_address: str | None = None,
    ) -> None:  # fmt: skip
        """Start every rank of the pod. Those of a former life have ended."""
        self.ranks = []
        for rank in pod.started:
            environment = pod.of_rank(rank, generation, master_port, master_address)
            process = RankProcess(rank, command, environment, start, alone=pod.config is not None)
            self.ranks.append(process)
            self._loop.add_reader(process._pipe, self._read, process)

    @property
    def alive(self) -> list[RankProcess]:
        return [process for process in self.ranks if process.alive]

    def terminate(self) -> None:
        """SIGTERM to all ranks that are alive."""
        for process in self.alive:
            process.terminate()

    def kill(self) -> None:
        """SIGKILL to all ranks that are alive."""
        for process in self.alive:
            process.kill()

    def reap(self) -> None:
        """Take the exit of every child that has ended: ranks, and orphans where this process is PID 1."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for process in self.ranks:
                if process.pid == pid and process.alive:
                    process.ended(status)
                    self._loop.remove_reader(process._pipe)
                    process.close()
                    self._on_end(process)

    def adopt_orphans(self) -> None:
        """Have what ranks leave behind become this process's child, as it does where this process is PID 1."""
        if ON_LINUX:
            libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def kill_orphans(self, spared: int | None = None) -> bool:
        """SIGKILL to what ranks that have all ended have left behind, which are all children but the one to spare;
        returns whether any of it is still there.

        It may hold the ports and files of the next life, also where it has left its rank's process group.
        """
        self.reap()
        left = [pid for pid in _children() if pid != spared]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return bool(left)

    def close(self) -> None:
        """Leave nothing running."""
        for process in self.ranks:
            process.kill()
        self._loop.remove_signal_handler(signal.SIGCHLD)

    def _read(self, process: RankProcess) -> None:
        if not process.read():
            self._loop.remove_reader(process._pipe)


def _children() -> list[int]:
    """All children of this process. Elsewhere than on Linux none is known: there the process groups have to do."""
    if not ON_LINUX:
        return []
    found, own = [], os.getpid()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((folder / "stat").read_bytes().rpartition(b")")[2].split()[1]) == own:
                found.append(int(folder.name))
    return found
