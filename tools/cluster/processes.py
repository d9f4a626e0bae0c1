"""Daemons with a pid file, and the way to find what is left of them.

A pid alone says little: the kernel hands it out again. A pid file therefore holds the start time as well, and a process
is signalled only if both agree. Every process also carries a mark in its environment, which its children inherit: so
even one whose pid file was never written (its parent was killed in between) is found, and nobody else's ever is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.cluster.errors import ClusterError

MARK = "DISTTRAIN_TEST_CLUSTER"
OWNER = "DISTTRAIN_TEST_CLUSTER_OWNER"


def dying_with_parent(command: Sequence[str | Path]) -> list[str]:
    """The command, such that the kernel kills it when the process that starts it is gone, however that comes."""
    return ["setpriv", "--pdeathsig", "KILL", *(str(part) for part in command)]


@dataclass(frozen=True)
class ProcessId:
    pid: int
    start_time: int
    """In clock ticks since boot, as /proc has it."""

    def text(self) -> str:
        return f"{self.pid}:{self.start_time}"

    @classmethod
    def parse(cls, text: str) -> ProcessId | None:
        pid, _, start_time = text.partition(":")
        return cls(int(pid), int(start_time)) if pid.isdigit() and start_time.isdigit() else None

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this pid now; None if there is none, or only a zombie."""
        state, start_time = _look(pid)
        return None if state in _ENDED else cls(pid, start_time)

    def alive(self) -> bool:
        state, start_time = _look(self.pid)
        if start_time != self.start_time:
            return False
        if state == "Z":
            # A child of this very process: nobody else can let it go, and until the last of its threads is gone (0) it
            # may still hold its ports.
            with contextlib.suppress(ChildProcessError):
                return os.waitpid(self.pid, os.WNOHANG)[0] == 0
        return state not in _ENDED

    def signal(self, number: signal.Signals) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def end(self, grace: float) -> None:
        """SIGTERM, then after `grace` seconds SIGKILL; returns when it is gone."""
        if grace > 0:
            self.signal(signal.SIGTERM)
            if self._gone_within(grace):
                return
        self.signal(signal.SIGKILL)
        if not self._gone_within(20):
            raise ClusterError(f"process {self.pid} does not end, not even by SIGKILL: it hangs in the kernel")

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True


_ENDED = ("Z", "X", "")


def _look(pid: int) -> tuple[str, int]:
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return "", 0


def parse_stat(stat: str) -> tuple[str, int]:
    """State and start time. The command's name stands in parentheses and may itself hold spaces and parentheses."""
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


class Daemon:
    """One program in the background: its command, its log and its pid file lie in one folder under its name."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        owner: ProcessId | None = None,
    ) -> None:
        self.name = name
        self._dies_with_owner = owner is not None
        self.command = dying_with_parent(command) if owner else [str(part) for part in command]
        self.log = folder / f"{name}.log"
        self.pid_file = folder / f"{name}.pid"
        self._environment = dict(environment or {})
        self._environment[MARK] = str(folder)
        if owner:
            self._environment[OWNER] = owner.text()

    def running(self) -> ProcessId | None:
        try:
            recorded = json.loads(self.pid_file.read_text())
            process = ProcessId(recorded["pid"], recorded["start_time"])
        except (OSError, ValueError, KeyError):
            return None
        return process if process.alive() else None

    def start(self) -> None:
        """Does nothing if it runs already. The process has its own session, so it outlives the shell that began it."""
        if self.running():
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        # Its end is read from /proc, by whichever process looks; this object would only warn that it still runs.
        child.returncode = 0
        if self._dies_with_owner:
            _wait_for_hand_over(child.pid)
        process = ProcessId.of(child.pid)
        if not process:
            raise ClusterError(self.end_message())
        fresh = self.pid_file.with_suffix(".pid.new")
        fresh.write_text(json.dumps({"pid": process.pid, "start_time": process.start_time}))
        fresh.replace(self.pid_file)

    def stop(self, grace: float = 10) -> None:
        """SIGTERM; SIGKILL after the grace."""
        if process := self.running():
            process.end(grace)
        self.pid_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """As a crash does it: SIGKILL, no goodbye."""
        self.stop(grace=0)

    def end_message(self) -> str:
        """One line about a daemon that does not run: the last thing it logged, and where the rest is."""
        try:
            lines = self.log.read_text(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return f"{self.name} ended: {lines[-1][:300] if lines else 'it logged nothing'} (log: {self.log})"


def _wait_for_hand_over(pid: int) -> None:
    """Until setpriv has become the program: only from then on does it die with whoever began it.

    Asked of `exe`, not of `comm`: an exec changes the first before it lets `Popen` return, the second only after.
    """
    setpriv = os.path.realpath(shutil.which("setpriv") or "setpriv")
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if str(Path(f"/proc/{pid}/exe").readlink()) != setpriv:
                return
        except OSError:
            return  # it has ended already
        time.sleep(0.002)


class Marked(NamedTuple):
    process: ProcessId
    folder: Path
    owner: ProcessId | None

    def abandoned(self) -> bool:
        return self.owner is not None and not self.owner.alive()


def marked(under: Path | None = None) -> Iterator[Marked]:
    """Every process that carries our mark (of a folder at or below `under`)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        folder, owner = parse_marks(environment)
        if folder is None or (under and not Path(folder).is_relative_to(under)):
            continue
        if process := ProcessId.of(int(entry.name)):
            yield Marked(process, Path(folder), owner)


def parse_marks(environment: bytes) -> tuple[str | None, ProcessId | None]:
    """The folder and the owner that a process' environment (as /proc/PID/environ has it) names."""
    variables = dict(part.split(b"=", 1) for part in environment.split(b"\0") if b"=" in part)
    folder = variables.get(MARK.encode())
    return folder.decode() if folder else None, ProcessId.parse(variables.get(OWNER.encode(), b"").decode())


def end_abandoned() -> None:
    """Ends the control planes whose owner (a test run, say) was killed before it could stop them."""
    for one in list(marked()):
        if one.abandoned():
            one.process.end(grace=0)
            shutil.rmtree(one.folder, ignore_errors=True)
