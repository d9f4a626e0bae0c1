"""Ranks of a command of the user's own can be asked how they get on while they run.

The first rank of a pod starts an agent (`agent.py`) when it begins to report, where nobody else is the pod's agent:
whoever starts the command could not know whether its image has one.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from disttrain_agent.own_ranks import introduce
from disttrain_agent.stacks import answer_for_stacks
from disttrain_api.names import Env
from disttrain_session.place import Place

LOG = "agent.log"
"""File of the agent's own lines, in the folder of the reports."""


def be_asked(place: Place, variables: Mapping[str, str] = os.environ) -> None:
    """Have this process be asked as the rank of its place, for as long as it runs. A rank that cannot be asked trains
    all the same."""
    if os.getpid() in _agents:
        return
    _agents[os.getpid()] = None
    with suppress(OSError):
        introduce(place.reports, place.rank)
        answer_for_stacks(place.rank, place.reports)
        if place.local_rank == 0 and variables.get(Env.AGENT_PORT) and sys.executable:
            _agents[os.getpid()] = _start_agent(place, variables)


def _start_agent(place: Place, variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    with (place.reports / LOG).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "disttrain_session.agent", str(os.getpid())],
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            # The program's own outputs would stay open for as long as the agent runs.
            stdout=log,
            stderr=log,
            # Signals for the program's process group are not for it.
            start_new_session=True,
        )


_agents: dict[int, object] = {}
"""By the process that can be asked: its agent, for which nobody waits. None: it has started none."""
