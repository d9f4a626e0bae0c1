"""The process that ranks are forked from which start again in their pod: it has imported what each would import.

    python -P -m disttrain_trainer.zygote     stdin: a socket whose other end the agent alone holds

It says READY once all is imported. Each message is a rank to start: its command and environment as a file in memory,
and the pipe that takes its output. The answer is the rank's pid. The rank becomes a child of the agent, its subreaper:
the process between them ends at once. The zygote has one thread, runs nothing of the user's and touches no GPU; where
it cannot be so, it ends, and the agent starts ranks as programs.
"""

import json
import os
import signal
import socket
import struct
import sys
import time

from disttrain_agent.import_ahead import has_met_the_driver, import_ahead
from disttrain_agent.parent import die_with
from disttrain_agent.zygote import DESCRIPTORS, PID, READY
from disttrain_trainer.runtime.forks import call_it, close_from, end_with, run_module

_MODULES = ("disttrain_trainer.program",)
_PAUSE_SECONDS = 0.0005


def main() -> int:
    agent = socket.socket(fileno=0)
    pid = os.getppid()
    if (ask := die_with(pid)) is not None:
        ask()
    import_ahead(_MODULES)
    # OpenBLAS ends its threads before a fork, and makes others when it is called.
    if (fork := os.fork()) == 0:
        os._exit(int(has_met_the_driver()))
    _, met = os.waitpid(fork, 0)
    if met or len(os.listdir("/proc/self/task")) > 1:  # noqa: PTH208 - no paths are needed
        return 0
    # The processes between agent and ranks are nobody's to wait for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    call_it("zygote")
    agent.send(READY)
    while True:
        message, descriptors, _, _ = socket.recv_fds(agent, 1, DESCRIPTORS)
        if not message:
            return 0
        agent.send(struct.pack(PID, _orphan(pid, *descriptors)))
        for descriptor in descriptors:
            os.close(descriptor)


def _orphan(agent: int, description: int, output: int) -> int:
    """Fork a rank that is nobody's child here, and return its pid."""
    told, tells = os.pipe()
    if os.fork() == 0:
        between = os.getpid()
        rank = os.fork()
        if rank == 0:
            _be_a_rank(agent, between, description, output)
        # Both set it: whoever comes first, the agent finds the group.
        os.setpgid(rank, rank)
        os.write(tells, struct.pack(PID, rank))
        os._exit(0)
    os.close(tells)
    with os.fdopen(told, "rb") as pipe:
        (pid,) = struct.unpack(PID, pipe.read(struct.calcsize(PID)))
    return int(pid)


def _be_a_rank(agent: int, between: int, description: int, output: int) -> None:
    """Become a rank of the agent once the process between them has ended, as its command is as a program. Does not
    return."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        with os.fdopen(description, "rb") as file:
            launch = json.load(file)
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        close_from(3)
        while os.getppid() == between:
            time.sleep(_PAUSE_SECONDS)
        if (die := die_with(agent)) is not None:
            die()
        os.environ.clear()
        os.environ.update(launch["environment"])
        module, *arguments = launch["module"]
        call_it(f"rank {launch['environment']['RANK']}")
        end_with(lambda: run_module(module, arguments))
    finally:
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
