"""Why pods that have a node do not start, where nothing but their Events says it: of each such job one pod's are read.

A pod whose image comes quickly, or that says itself what it waits for, costs no request. A job's Events are read less
and less often while it waits, and those of all jobs `MOST` at a time: in each round namespaces take turns, and those
who have waited longest for theirs come first. What is read is a fact of the next decision; none waits for it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from disttrain_operator.decide.observed import PodEvent, PodFacts
from disttrain_operator.decide.pod_events import what_holds_up
from disttrain_operator.fair_queue import FairQueue
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.lists import read_page
from disttrain_operator.snapshot import Key, World, core_collection

logger = logging.getLogger(__name__)

ROUND_SECONDS = 5.0
MOST = 20
"""Requests of one round."""
PATIENCE_SECONDS = 20.0
"""How long pods may take before anybody asks why."""
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 30.0, 120.0
"""Between two requests for one job. A kubelet tries again, and says so, every two minutes at least."""
MAX_EVENTS, MAX_BYTES = 50, 256 * 1024
"""An answer has no more than this."""
_PER_TURN = 100
"""Jobs that are looked at in one turn of the event loop."""


@dataclass
class _Waiting:
    """A job some of whose pods have a node and do not start."""

    attempt: int
    due: float
    pause: float = PAUSE_SECONDS
    pod: PodFacts | None = None
    """Whose Events were read last."""
    event: PodEvent | None = None
    """What they say."""


class PodEvents:
    """Reads Events, and keeps what those of each job say."""

    def __init__(
        self,
        client: Client,
        world: World,
        wake: Callable[[str], None],
        active: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`wake`: have a job looked at, by its uid."""
        self._client, self._world, self._wake, self._active, self._clock = client, world, wake, active, clock
        self._now = now
        self._waiting: dict[str, _Waiting] = {}

    def event(self, job_uid: str) -> PodEvent | None:
        """Return what delays a pod of the job, by its Events; None if that is not known."""
        known = self._waiting.get(job_uid)
        return known.event if known is not None else None

    async def run(self) -> None:
        """Read, round after round, until cancelled."""
        while True:
            if self._active():
                await self.round()
            await asyncio.sleep(ROUND_SECONDS)

    async def round(self) -> None:
        """Read the Events of those jobs whose turn it is."""
        line: FairQueue[tuple[Key, PodFacts]] = FairQueue()
        for _, key, pod in sorted(await self._due(), key=lambda entry: entry[0]):
            line.push(key.namespace, (key, pod))
        for _ in range(min(MOST, len(line))):
            key, pod = line.pop()
            if not self._active():
                return
            await self._read(key, pod, self._waiting[key.uid])

    async def _due(self) -> list[tuple[float, Key, PodFacts]]:
        """Return whose turn it is, since when, and the pod. Jobs that wait no more are forgotten."""
        due, waiting = list[tuple[float, Key, PodFacts]](), dict[str, _Waiting]()
        for number, uid in enumerate(self._world.looked_at()):
            if number % _PER_TURN == _PER_TURN - 1:
                await asyncio.sleep(0)
            if self._world.simply_runs(uid):
                continue
            key, pods = self._world.key_of(uid), _held_up(self._world.last_seen(uid))
            if key is None or not pods:
                continue
            known = self._waiting.get(uid)
            if known is None or known.attempt != pods[0].attempt:
                known = _Waiting(pods[0].attempt, self._clock() + self._patience_left(pods))
            waiting[uid] = known
            if self._clock() >= known.due:
                due.append((known.due, key, _next(pods, known)))
        self._waiting = waiting
        return due

    def _patience_left(self, pods: Iterable[PodFacts]) -> float:
        """Return for how long to wait before asking why these do not start. They may not be new to a process that
        begins."""
        placed = min((pod.scheduled_at for pod in pods if pod.scheduled_at is not None), default=None)
        waited = 0.0 if placed is None else (self._now() - placed).total_seconds()
        return min(max(PATIENCE_SECONDS - waited, 0.0), PATIENCE_SECONDS)

    async def _read(self, key: Key, pod: PodFacts, waiting: _Waiting) -> None:
        found = waiting.event
        try:
            found = await self._events_of(key.namespace, pod)
        except Exception as error:
            # Whatever it is, it costs this job's sentence and nothing else.
            logger.debug("%s: the Events of pod %s cannot be read: %s", key, pod.name, error)
        again = waiting.pod is not None and waiting.pod.uid == pod.uid
        waiting.pause = min(2 * waiting.pause, MAX_PAUSE_SECONDS) if again else PAUSE_SECONDS
        waiting.due, waiting.pod = self._clock() + waiting.pause, pod
        if found != waiting.event:
            waiting.event = found
            self._wake(key.uid)

    async def _events_of(self, namespace: str, pod: PodFacts) -> PodEvent | None:
        path = core_collection("events", namespace)
        query = {"fieldSelector": f"involvedObject.uid={pod.uid}", "limit": str(MAX_EVENTS)}
        page = await read_page(await self._client.read(path, query, MAX_BYTES), path)
        return what_holds_up(pod.uid, page.objects)


def _held_up(pods: Iterable[PodFacts]) -> list[PodFacts]:
    """The pods of the newest attempt that have a node, do not start and give no reason; in their order."""
    seen = [pod for pod in pods if not pod.gone]
    newest = max((pod.attempt for pod in seen), default=0)
    held_up = (pod for pod in seen if pod.node and not pod.program_started and pod.waiting is None and not pod.deleting)
    return sorted((pod for pod in held_up if pod.attempt == newest), key=_place)


def _next(pods: list[PodFacts], waiting: _Waiting) -> PodFacts:
    """The pod that was asked last, where its Events say something; else the one after it."""
    last = waiting.pod
    if last is None:
        return pods[0]
    if waiting.event is not None:
        return next((pod for pod in pods if pod.uid == last.uid), pods[0])
    return next((pod for pod in pods if _place(pod) > _place(last)), pods[0])


def _place(pod: PodFacts) -> tuple[str, int]:
    return pod.role, pod.index
