"""A warm start for ranks that start again in their pod: forks of a process that has imported torch, the zygote.

The program is disttrain_trainer/zygote.py. It is started when the ranks train, so that it delays no start of theirs; in
the replacement of a lost pod before anything else, where the ranks begin as its forks, too.
"""

import asyncio
import contextlib
import errno
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from disttrain_agent.processes import Child, Start, execute
from disttrain_agent.zygote_process import ZygoteProcess, start_zygote

DESCRIPTORS = 2
READY = b"r"
PID = "!i"
_MODULE = (sys.executable, "-P", "-m")
_ANSWER_SECONDS = 5.0
"""It has nothing else to do, so a fork takes milliseconds."""


@dataclass
class Forked:
    """A rank that the zygote has forked: a child of this process, since that is the subreaper of both."""

    pid: int
    stdout: IO[bytes] | None
    returncode: int | None = None


class Zygote:
    """Starts ranks from a process that has imported torch, where there is one, else as programs."""

    def __init__(self, start: Start = execute, running: ZygoteProcess | None = None, *, warm: bool = True) -> None:
        """start: of a rank as a program. running: it has been started already. warm: whether there is to be one."""
        self.changed: Callable[[], None] = lambda: None
        """Called when it is ready, or has ended before."""
        self._start, self._running = start, running
        self._socket: socket.socket | None = None
        self._begun = not warm
        self._ready = False
        self.pid: int | None = None

    @property
    def imports(self) -> bool:
        """Return whether it has begun and is not ready yet."""
        return self._socket is not None and not self._ready

    def begin(self, environment: Mapping[str, str]) -> None:
        """Start it, once, unless it runs. environment: of a rank."""
        if self._begun:
            return
        self._begun = True
        process = self._running or start_zygote(environment)
        if process is not None:
            self.pid, self._socket = process.pid, process.socket
            asyncio.get_running_loop().add_reader(self._socket, self._hear)

    def start(self, command: Sequence[str], environment: dict[str, str]) -> Child:
        """The Start of a rank. Raises OSError."""
        if self._ready and tuple(command[: len(_MODULE)]) == _MODULE:
            forked = self._fork(command[len(_MODULE) :], environment)
            if forked is not None:
                return forked
        return self._start(command, environment)

    def close(self) -> None:
        """Let it end."""
        self._ready = False
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _hear(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            if self._socket.recv(1) == READY:
                self._ready = True
            else:
                # It has ended, or says what it never says.
                self.close()
            self.changed()

    def _fork(self, module: Sequence[str], environment: dict[str, str]) -> Forked | None:
        """Let the zygote fork a rank; None where it has ended. Raises OSError where nobody knows whether it did."""
        assert self._socket is not None
        out, rank_out = os.pipe()
        try:
            with os.fdopen(os.memfd_create("rank"), "wb") as description:
                description.write(json.dumps({"module": list(module), "environment": environment}).encode())
                description.flush()
                os.lseek(description.fileno(), 0, os.SEEK_SET)
                socket.send_fds(self._socket, [b"f"], [description.fileno(), rank_out])
        except OSError:
            os.close(out)
            self.close()
            return None
        finally:
            os.close(rank_out)
        stdout = os.fdopen(out, "rb", buffering=0)
        try:
            self._socket.settimeout(_ANSWER_SECONDS)
            (pid,) = struct.unpack(PID, self._socket.recv(struct.calcsize(PID)))
        except (OSError, struct.error) as error:
            # There may be a rank that nobody knows: it dies with this process, and no other is started beside it.
            stdout.close()
            self.close()
            raise OSError(errno.EPIPE, "the process that forks them does not answer") from error
        self._socket.setblocking(False)
        return Forked(pid, stdout)
