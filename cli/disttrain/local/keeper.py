"""The parent of one local pod: what a container's walls are on a cluster. Standard library only.

    keeper.py COMMAND …        stdin: a pipe whose other end the runner alone holds

It starts COMMAND and ends with its exit code (128 + n for signal n). When COMMAND has ended, when the runner says so,
or when the runner is gone, however it went, every process that COMMAND has left is killed: orphans come to the keeper,
which is their subreaper, so neither double forks nor sessions of their own help them.

A script of its own, or what a fork of the fork server (fork_server.py) does.

On stdin: T forwards SIGTERM to COMMAND, K kills everything, end of file (the runner is gone) kills everything.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform.startswith("linux")
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)


def main(command: list[str]) -> int:
    return keep(lambda: os.execvp(command[0], command), command[0])


def keep(run: Callable[[], object], name: str) -> int:
    """Keep a child that does `run`, called `name` where it cannot, and return its exit code."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    prctl = ctypes.CDLL(None).prctl if _LINUX else None
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = _start(run, name, prctl)
    while True:
        readable, _, _ = select.select([0, wake], [], [])
        if wake in readable and signal.SIGTERM in os.read(wake, 4096):
            _signal(child, signal.SIGTERM)
        status = _reap(child)
        if status is not None:
            _kill_all(child)
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        if 0 in readable:
            orders = os.read(0, 64)
            if b"K" in orders or not orders:
                _kill_all(child)
                return 128 + signal.SIGKILL
            if b"T" in orders:
                _signal(child, signal.SIGTERM)


def fork() -> int:
    """Same as os.fork, but the child has no signal handlers.

    One that comes to it before it has given up its parent's waits until it has: a SIGTERM that those take would be
    lost, and the child would live on for its whole grace.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


def _start(run: Callable[[], object], name: str, prctl: Callable[..., int] | None) -> int:
    keeper = os.getpid()
    if child := fork():
        return child
    try:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != keeper:
                os._exit(1)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        run()
    except OSError as error:
        os.write(2, f"cannot execute {name}: {error.strerror}\n".encode())
    os._exit(127)


def _reap(child: int) -> int | None:
    """Reap whatever has ended; the wait status of `child` if it was among them."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while (entry := os.waitpid(-1, os.WNOHANG))[0]:
            if entry[0] == child:
                found = entry[1]
    return found


def _kill_all(child: int) -> None:
    """SIGKILL to all descendants until none is left."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for pid in _descendants():
            _signal(pid, signal.SIGKILL)
        try:
            # Their children are ours by now. One that is stuck in the kernel is waited for: it still runs.
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants() -> list[int]:
    """All processes below this one, from /proc; elsewhere the process group has to do."""
    if not _LINUX:
        return []
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib would double the start-up time
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, todo = [], [os.getpid()]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
