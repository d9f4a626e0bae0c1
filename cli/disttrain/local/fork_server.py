"""The process that the trainers of a local run are forked from: what they all import is imported once, not by each.

    fork_server.py MODULE …        stdin: a socket whose other end the runner alone holds (kept.py)

Each message is a pod: its launch, the pipe of its keeper's orders, its log, and the pipe on which its end is told:
SERVED once its keeper runs, then its exit code; nothing more where the keeper was killed. A fork of this process is the
keeper, a fork of that the agent, forks of that the ranks: the tree of processes that programs of their own would be.

It runs nothing of the user's, whose threads and random numbers would be in every rank.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

from disttrain.local import keeper
from disttrain_agent.main import main as agent
from disttrain_agent.processes import Child, die_with
from disttrain_trainer.runtime.leaving import leave

AGENT = "disttrain_agent"
DESCRIPTORS = 4
SERVED = b"s"

_END = 3
"""Descriptor on which a keeper tells its end."""


def main(modules: Sequence[str]) -> int:
    runner = socket.socket(fileno=0)
    if (ask := die_with(os.getppid())) is not None:
        ask()
    # Keepers are nobody's to wait for: each tells its end itself.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _import(modules)
    while True:
        message, descriptors, _, _ = socket.recv_fds(runner, 1, DESCRIPTORS)
        if not message:
            return 0
        if os.fork() == 0:
            _be_a_keeper(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _import(modules: Sequence[str]) -> None:
    # As the trainer does it, and before torch, which reads the variable when it is imported.
    gc.disable()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Who asks for GPUs while it is imported asks the machine, not the driver, which no fork could use then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in modules:
        # A rank that needs what cannot be imported says so itself.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def _be_a_keeper(description: int, orders: int, log: int, end: int) -> None:
    """Become the keeper of a pod, as keeper.py is as a program. Does not return."""
    code = 1
    try:
        with os.fdopen(description, "rb") as file:
            launch = json.load(file)
        os.setsid()
        for source, target in ((orders, 0), (log, 1), (log, 2), (end, _END)):
            os.dup2(source, target)
        _close_from(_END + 1)
        os.environ.clear()
        os.environ.update(launch["environment"])
        os.chdir(launch["folder"])
        module, *arguments = launch["module"]
        _call_it("keeper")
        if _has_met_the_driver():
            return
        os.write(_END, SERVED)
        code = keeper.keep(lambda: _be_the_pod(module, arguments), module)
        os.write(_END, bytes([code]))
    finally:
        os._exit(code)


def _has_met_the_driver() -> bool:
    """Return whether an import has used a GPU's driver after all: pods are then started as separate programs."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())


def _be_the_pod(module: str, arguments: Sequence[str]) -> None:
    """Become the first process below the keeper."""
    _close_from(3)
    if module == AGENT:
        _call_it("agent")
        _end_with(lambda: agent(arguments, fork_rank))
    _end_with(lambda: _run(module, arguments))


@dataclass
class ForkedRank:
    """A rank that is a fork of its agent."""

    pid: int
    stdout: IO[bytes] | None
    returncode: int | None = None


def fork_rank(command: Sequence[str], environment: dict[str, str]) -> Child:
    """The agent's Start of `python -P -m MODULE …`."""
    _, _, _, module, *arguments = command
    out, rank_out = os.pipe()
    die = die_with(os.getpid())
    if pid := keeper.fork():
        os.close(rank_out)
        return ForkedRank(pid, os.fdopen(out, "rb", buffering=0))
    try:
        if die is not None:
            die()
        os.setpgid(0, 0)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (rank_out, 1), (rank_out, 2)):
            os.dup2(source, target)
        _close_from(3)
        os.environ.clear()
        os.environ.update(environment)
        _call_it(f"rank {environment['RANK']}")
        _end_with(lambda: _run(module, arguments))
    finally:
        os._exit(1)


def _run(module: str, arguments: Sequence[str]) -> int:
    """`python -P -m MODULE ARGUMENTS`."""
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _end_with(program: Callable[[], int]) -> None:
    """End this process as an interpreter that runs nothing else would."""
    code = 1
    # As it sets them when it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # What files of the processes that this one is a fork of hold back is theirs to write.
    gc.freeze()
    try:
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        leave(code)


def _close_from(first: int) -> None:
    """Their owners are in frames of the process that this one is a fork of: none of them runs again here."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - pathlib would make paths of numbers
        if int(name) >= first:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _call_it(name: str) -> None:
    """Set the name that `ps` and `top` show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123 - pathlib says no less
        file.write(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
