"""The process that the trainers of a local run are forked from: what they all import is imported once, not by each.

    fork_server.py MODULE …        stdin: a socket whose other end the runner alone holds (kept.py)

Each message is a pod: its launch, the pipe of its keeper's orders, its log, and the pipe on which its end is written:
SERVED once its keeper runs, then its exit code; nothing more where the keeper was killed. A fork of this process is the
keeper, a fork of that the agent, forks of that the ranks: the tree of processes that programs of their own would be.

It runs nothing of the user's, whose threads and random numbers would be in every rank.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from disttrain.local import keeper
from disttrain_agent.import_ahead import has_met_the_driver, import_ahead
from disttrain_agent.main import main as agent
from disttrain_agent.parent import die_with
from disttrain_agent.processes import Child
from disttrain_trainer.runtime.forks import call_it, close_from, end_with, run_module

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
    import_ahead(modules)
    while True:
        message, descriptors, _, _ = socket.recv_fds(runner, 1, DESCRIPTORS)
        if not message:
            return 0
        if os.fork() == 0:
            _be_a_keeper(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _be_a_keeper(description: int, orders: int, log: int, end: int) -> None:
    """Become the keeper of a pod, as keeper.py is as a program. Does not return."""
    code = 1
    try:
        with os.fdopen(description, "rb") as file:
            launch = json.load(file)
        os.setsid()
        for source, target in ((orders, 0), (log, 1), (log, 2), (end, _END)):
            os.dup2(source, target)
        close_from(_END + 1)
        os.environ.clear()
        os.environ.update(launch["environment"])
        os.chdir(launch["folder"])
        module, *arguments = launch["module"]
        call_it("keeper")
        if has_met_the_driver():
            return
        os.write(_END, SERVED)
        code = keeper.keep(lambda: _be_the_pod(module, arguments), module)
        os.write(_END, bytes([code]))
    finally:
        os._exit(code)


def _be_the_pod(module: str, arguments: Sequence[str]) -> None:
    """Become the first process below the keeper."""
    close_from(3)
    if module == AGENT:
        call_it("agent")
        end_with(lambda: agent(arguments, fork_rank))
    end_with(lambda: run_module(module, arguments))


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
        close_from(3)
        os.environ.clear()
        os.environ.update(environment)
        call_it(f"rank {environment['RANK']}")
        end_with(lambda: run_module(module, arguments))
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
