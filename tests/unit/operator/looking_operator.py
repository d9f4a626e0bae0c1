"""An operator with one worker and one job, whose looks take a time of the test's own."""

import asyncio
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from disttrain_operator import reconcile
from disttrain_operator.decide.decision import Decision
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.execute import Executor
from disttrain_operator.metrics import Metrics
from disttrain_operator.plan.site import Site
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.refused import Refused
from disttrain_operator.snapshot import Key, World
from disttrain_operator.wakeups import Wakeups
from tests.builders import NOW, a_job, a_raw_job, a_raw_pod, ended, merge, running
from tests.unit.operator.clocked_loop import ClockedLoop

PODS = 200
LOOK = 0.01
"""Seconds of one."""
QUIET = Decision("PodsStarting", "")


class Operator:
    """One worker, and a job that is decided upon as the test says."""

    max_in_flight = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.looks, self.decision = ClockedLoop(), 0, QUIET
        self._busy, self._version = 0.0, 1
        monkeypatch.setattr(reconcile, "time", SimpleNamespace(perf_counter=lambda: self._busy))
        self.queue, self.world = WorkQueue[Key](), World()
        executor = Executor(self, self.world, lambda job: Site(trainer_image="image", token="token"))  # type: ignore[arg-type]
        self.reconciler = Reconciler(
            self,  # type: ignore[arg-type]
            self.world,
            executor,
            self.queue,
            decide=self._decide,
            now=lambda: NOW + timedelta(seconds=self.loop.now),
        )
        self.world.listener = Wakeups(self.queue, Refused(), Metrics())
        for cache in (self.world.jobs, self.world.pods, self.world.services):
            cache.replace([], 1)
        self.raw = self._next(a_raw_job(workers={"replicas": PODS}))
        self._worker = self.loop.create_task(self.reconciler.work())
        self.loop.call(self.world.jobs.observe, self.raw)
        self.rest()

    def _decide(self, job: Job, observed: Observed, now: datetime) -> Decision:
        self.looks += 1
        self._busy += LOOK
        return self.decision

    async def replace(self, path: str, body: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Take a status, as an API server does."""
        self.raw = self._next(merge(self.raw, {"status": body["status"]}))
        return self.raw

    def _next(self, raw: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        return merge(raw, {"metadata": {"resourceVersion": str(self._version)}})

    def pod(self, index: int, *, ends: bool = False) -> None:
        """One runs, or ends."""
        pod = a_raw_pod(a_job(workers={"replicas": PODS}), index=index)
        self.loop.call(self.world.pods.observe, self._next(ended(pod, 1) if ends else running(pod)))

    def rest(self) -> None:
        """So long that the next change has the job looked at."""
        self.loop.pass_time(10)
        self.looks = 0

    def close(self) -> None:
        self._worker.cancel()
        self.loop.run_until_complete(asyncio.wait({self._worker}))
        self.loop.close()
