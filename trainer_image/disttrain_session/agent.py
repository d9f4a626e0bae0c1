"""The agent beside a program that reports: it answers how the pod's ranks get on while they run, as other agents do.

    python3 -P -m disttrain_session.agent PID

PID is the first rank of the pod, which starts it (`asked.py`) and with which it ends. It starts nothing itself: the
command, its exit code, its output and its signals are as without it.
"""

import asyncio
import contextlib
import functools
import os
import sys
from collections.abc import Mapping

from disttrain_agent.listen import Listener, listen
from disttrain_agent.look import Look
from disttrain_agent.own_ranks import OwnRanks
from disttrain_agent.reports import LOOK_SECONDS, Reports
from disttrain_agent.step_clock import StepClock
from disttrain_session.place import Place, place_of, pod_of


def main(rank: int, variables: Mapping[str, str] = os.environ) -> int:
    """Answer until the process `rank`, this one's parent, has ended."""
    place = place_of(variables)
    if place is not None:
        asyncio.run(_answer(place, variables, rank))
    return 0


async def _answer(place: Place, variables: Mapping[str, str], rank: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(OSError, AttributeError):
        # At once; without it at the next look.
        loop.add_reader(os.pidfd_open(rank), ended.set)
    own, reports = OwnRanks(place.reports, place.ranks), Reports(place.reports, place.ranks)
    steps = StepClock(place.reports, place.ranks)
    look = Look(pod_of(place, variables), own, reports, steps=steps)
    listener: Listener | None = None
    watch = loop.create_task(steps.watch())
    while os.getppid() == rank and not ended.is_set():
        # The agent of a former process may still have the port.
        listener = listener or listen(pod_of(place, variables), look, _say_once)
        for one in place.ranks:
            reports.of(one)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), LOOK_SECONDS)
    watch.cancel()
    if listener is not None:
        listener.close()


@functools.cache
def _say_once(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
