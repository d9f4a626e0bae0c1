"""The start of the process that ranks are forked from. Imported before the agent's own modules: it takes a few of
Python's alone."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disttrain_agent.parent import ON_LINUX, die_with
from disttrain_api.names import Env

COMMAND = (sys.executable, "-P", "-m", "disttrain_trainer.zygote")
_OF_A_REPLACEMENT = (Env.REPLACEMENT, Env.RESTARTS_IN_PLACE, Env.CONFIG)


@dataclass(frozen=True)
class ZygoteProcess:
    """A process that imports. `socket`: this side's end of what it is asked through; it ends when that is closed."""

    pid: int
    socket: socket.socket


def start_zygote(environment: Mapping[str, str]) -> ZygoteProcess | None:
    """Start it; None where it cannot be: that costs the warm start alone. environment: of a rank."""
    if not ON_LINUX:
        return None
    try:
        ours, theirs = socket.socketpair()
    except OSError:
        return None
    with theirs:
        try:
            process = subprocess.Popen(
                COMMAND,
                env=environment,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
                # As for a rank: it asks the same itself, but only once Python runs.
                preexec_fn=die_with(os.getpid()),  # noqa: PLW1509
            )
        except (OSError, subprocess.SubprocessError):
            ours.close()
            return None
    # It is reaped with all other children of this process.
    process.returncode = 0
    ours.setblocking(False)
    return ZygoteProcess(process.pid, ours)


def start_before_the_agent(variables: Mapping[str, str], command: Sequence[str]) -> ZygoteProcess | None:
    """Start it where this pod replaces a lost one, for which all others wait; None elsewhere. The agent takes a third
    of a second to import what it needs, and whether the pod's environment is right it says afterwards."""
    if command or not all(name in variables for name in _OF_A_REPLACEMENT):
        return None
    several = variables.get(Env.LOCAL_WORLD_SIZE) != "1"
    return start_zygote({**rank_defaults(several=several), **variables})


def rank_defaults(*, several: bool) -> dict[str, str]:
    """Return what the environment of a rank has where the pod's does not say otherwise. several: ranks in the pod."""
    # As torchrun does: every rank would otherwise start a thread per core of the node.
    return {"PYTHONUNBUFFERED": "1"} | ({"OMP_NUM_THREADS": "1"} if several else {})
