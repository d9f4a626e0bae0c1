"""How long a job rests after a look: pods that start one after the other cost few looks, and one that ends waits for
none. A look takes a time of the test's own, and the loop's time passes when the test says so.
"""

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from disttrain_operator import reconcile
from disttrain_operator.decide.decision import Decision
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.execute import Executor
from disttrain_operator.metrics import Metrics
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.refused import Refused
from disttrain_operator.snapshot import Key, World
from disttrain_operator.wakeups import Wakeups
from tests.builders import NOW, UID, a_job, a_raw_job, a_raw_pod, ended, merge, running
from tests.unit.operator.clocked_loop import ClockedLoop
from tests.unit.operator.test_reconcile import SITE

PODS = 200
LOOK = 0.01
"""Seconds of one."""
LEAST, USUAL = 4 * LOOK, 19 * LOOK
QUIET = Decision("PodsStarting", "")


class Operator:
    """One worker, and a job that is decided upon as the test says."""

    max_in_flight = 1

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.looks, self.decision = ClockedLoop(), 0, QUIET
        self._busy, self._version = 0.0, 1
        monkeypatch.setattr(reconcile, "time", SimpleNamespace(perf_counter=lambda: self._busy))
        self.queue, self.world = WorkQueue[Key](), World()
        executor = Executor(self, self.world, lambda job: SITE)  # type: ignore[arg-type]
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


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    made = Operator(monkeypatch)
    yield made
    made.close()


def test_pods_that_start_one_after_the_other_cost_a_twentieth_of_the_time(operator: Operator) -> None:
    """Red where a job rests as long after a look of which nothing came as after others."""
    for index in range(PODS):
        operator.pod(index)
        operator.loop.pass_time(LOOK)
    assert operator.looks <= 1 + PODS * LOOK / USUAL
    operator.loop.pass_time(USUAL)
    looks = operator.looks
    operator.loop.pass_time(10)
    assert operator.looks == looks, "the last pod was looked at"


def test_a_pod_that_ends_waits_for_no_rest(operator: Operator) -> None:
    """Red where the end of a pod is no more urgent than its start."""
    operator.pod(0)
    operator.pod(1)
    assert operator.looks == 1
    operator.pod(2, ends=True)
    assert operator.looks == 2


def test_pods_that_end_one_after_the_other_cost_a_fifth_of_the_time(operator: Operator) -> None:
    """Red where each of them has the job looked at."""
    for index in range(PODS):
        operator.pod(index, ends=True)
        operator.loop.pass_time(LOOK)
    assert PODS * LOOK / LEAST / 2 <= operator.looks <= 2 + PODS * LOOK / LEAST


def test_a_rest_is_over_when_the_decision_asks_for_the_next_look(operator: Operator) -> None:
    """Red where a time that was decided upon, as that of a verdict, waits for the longer rest."""
    between = (LEAST + USUAL) / 2
    operator.decision = Decision("Judging", "", requeue_at=NOW + timedelta(seconds=operator.loop.now + between))
    operator.pod(0)
    assert operator.looks == 1
    operator.loop.pass_time(between - 0.001)
    assert operator.looks == 1
    operator.loop.pass_time(0.002)
    assert operator.looks == 2


def test_a_look_that_has_news_is_followed_by_the_next_one_sooner(operator: Operator) -> None:
    job = operator.world.job(UID)
    assert job is not None
    operator.decision = Decision("Starts", "", status=job.status.model_copy(update={"ready": "1/200"}))
    operator.pod(0)
    assert operator.looks == 1
    operator.pod(1)
    operator.loop.pass_time(LEAST + 0.001)
    assert operator.looks == 2
    operator.pod(2)
    operator.loop.pass_time(LEAST + 0.001)
    assert operator.looks == 2, "nothing came of the look before"
    operator.loop.pass_time(USUAL - LEAST)
    assert operator.looks == 3
