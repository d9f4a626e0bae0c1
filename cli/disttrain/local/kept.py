"""The process of a pod as the runner sees it: a keeper, started as a program or forked from the fork server."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from disttrain.local.launch import Launch
from disttrain_api.names import Env, ExitCode
from disttrain_api.spec import JobSpec

TERMINATE = b"T"
KILL = b"K"

_KEEPER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py"))]
_FORK_SERVER = [sys.executable, "-P", "-m", "disttrain.local.fork_server"]
_MODULE = (sys.executable, "-P", "-m")
_OWN_PACKAGES = ("disttrain_agent", "disttrain_trainer")
_OF_A_POD = {name for key, name in vars(Env).items() if not key.startswith("_")} | {"CUDA_VISIBLE_DEVICES"}
"""Variables that nothing reads while it is imported. In any other, all forks are like the first."""


class Kept(Protocol):
    """A keeper that lives, or that is about to."""

    def order(self, letter: bytes) -> None:
        """TERMINATE or KILL, if it still lives."""

    async def wait(self) -> int:
        """Its exit code: that of its pod. May be awaited once."""


async def execute(launch: Launch, log: Path) -> Kept:
    """Start a pod as a program of its own. Raises OSError."""
    if not launch.command:
        raise FileNotFoundError(0, "the pod has no command, and an image's own cannot run without a cluster")
    program = shutil.which(launch.command[0], path=launch.environment.get("PATH"))
    if program is None:
        raise FileNotFoundError(0, "no such program", launch.command[0])
    with log.open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *_KEEPER,
            program,
            *launch.command[1:],
            env=dict(launch.environment),
            cwd=launch.folder if launch.folder.is_dir() else None,
            stdin=asyncio.subprocess.PIPE,
            stdout=out,
            stderr=out,
            # A terminal's Ctrl-C is for the runner, which stops the pods in order.
            start_new_session=True,
        )
    return _Executed(process)


class _Executed:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def order(self, letter: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(letter)

    async def wait(self) -> int:
        code = await self._process.wait()
        return code if code >= 0 else 128 - code


class ForkServer:
    """Forks pods of our own programs from one process (fork_server.py), which has imported `modules` and lives with the
    first of them. On Linux: elsewhere system libraries do not survive a fork.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._process: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._like: tuple[Path, Mapping[str, str]] | None = None

    async def start(self, launch: Launch, log: Path) -> Kept:
        """Fork a pod where that is possible, else execute it. Raises OSError."""
        like = (launch.folder, {key: value for key, value in launch.environment.items() if key not in _OF_A_POD})
        if not (self._modules and sys.platform == "linux" and _is_own_program(launch)):
            return await execute(launch, log)
        if self._process is None or self._process.returncode is not None:
            await self._begin(launch)
            self._like = like
        elif like != self._like:
            return await execute(launch, log)
        return self._fork(launch, log) or await execute(launch, log)

    def abandon(self) -> None:
        """End the fork server, if it runs. Pods that it has not forked yet get an error; forked ones continue."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """It has ended."""
        self.abandon()
        if self._process is not None:
            await self._process.wait()

    async def _begin(self, launch: Launch) -> None:
        self.abandon()
        self._socket, pod_ends = socket.socketpair()
        self._socket.setblocking(False)
        with pod_ends:
            self._process = await asyncio.create_subprocess_exec(
                *_FORK_SERVER,
                *self._modules,
                env=dict(launch.environment),
                cwd=launch.folder,
                stdin=pod_ends,
                stdout=asyncio.subprocess.DEVNULL,
                # What cannot be imported here, a rank will say.
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )

    def _fork(self, launch: Launch, log: Path) -> Kept | None:
        """Let the fork server fork the pod; None if it has no room for more, or has ended."""
        if self._socket is None:
            return None
        described = {
            "module": launch.command[len(_MODULE) :],
            "environment": dict(launch.environment),
            "folder": str(launch.folder),
        }
        with contextlib.ExitStack() as own_ends, contextlib.ExitStack() as pod_ends:
            orders, orders_write = os.pipe()
            end_read, end = os.pipe()
            for descriptor in (orders_write, end_read):
                own_ends.callback(os.close, descriptor)
            for descriptor in (orders, end):
                pod_ends.callback(os.close, descriptor)
            description = pod_ends.enter_context(os.fdopen(os.memfd_create("launch"), "wb"))
            description.write(json.dumps(described).encode())
            description.flush()
            os.lseek(description.fileno(), 0, os.SEEK_SET)
            out = pod_ends.enter_context(log.open("ab"))
            try:
                socket.send_fds(self._socket, [b"p"], [description.fileno(), orders, out.fileno(), end])
            except OSError:
                return None
            own_ends.pop_all()
        return _Forked(self, launch, log, orders_write, end_read)


class _Forked:
    def __init__(self, fork_server: ForkServer, launch: Launch, log: Path, orders: int, end: int) -> None:
        self._fork_server, self._launch, self._log = fork_server, launch, log
        self._orders: int | None = orders
        self._end = end
        self._ordered = b""
        self._served = False
        self._instead: Kept | None = None

    def order(self, letter: bytes) -> None:
        self._ordered += letter
        if self._instead is not None:
            self._instead.order(letter)
        elif self._orders is not None:
            with contextlib.suppress(OSError):
                os.write(self._orders, letter)
            if not self._served:
                # It would read it only when all is imported.
                self._fork_server.abandon()

    async def wait(self) -> int:
        ended = await self._listen()
        if ended:
            return ended[1] if len(ended) > 1 else 128 + signal.SIGKILL
        if self._ordered:
            return 128 + signal.SIGKILL if KILL in self._ordered else ExitCode.STOPPED
        instead = await execute(self._launch, self._log)
        # What came while it was being started.
        for letter in self._ordered:
            instead.order(bytes([letter]))
        self._instead = instead
        return await instead.wait()

    async def _listen(self) -> bytes:
        """All that the keeper writes; empty where there never was one. Nobody reads orders after that."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._end, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            first = await reader.read(1)
            self._served = bool(first)
            return first + await reader.read()
        finally:
            transport.close()
            assert self._orders is not None
            os.close(self._orders)
            self._orders = None


def _is_own_program(launch: Launch) -> bool:
    command = launch.command
    own = command[: len(_MODULE)] == _MODULE and command[len(_MODULE)].partition(".")[0] in _OWN_PACKAGES
    return own and launch.folder.is_dir()


def modules_of(spec: JobSpec) -> tuple[str, ...]:
    """Return the modules that all ranks of a job import: the trainer, and built-in data and models."""
    if spec.training is None:
        return ()
    modules = ["disttrain_trainer.program"]
    if spec.training.data.name is not None:
        modules.append(f"disttrain_trainer.data.{spec.training.data.name}")
    if spec.training.model.name is not None:
        modules.append(f"disttrain_trainer.models.{spec.training.model.name}.model")
    return tuple(modules)
