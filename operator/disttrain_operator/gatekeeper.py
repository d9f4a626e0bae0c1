"""The gate's shell: watches all nodes and pods, and runs a scheduling cycle whenever they change.

One cycle at a time, and what it admits is reserved until the pods themselves show that they were let go: two gangs that
fit only one at a time never both go. A cycle costs time in proportion to the cluster, so it runs in a thread while the
loop goes on, and rests afterwards. Its decision counts only where what it was decided from is still so.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import islice

from disttrain_api.scheduling import GangScheduler
from disttrain_operator.decide.attempt_history import in_attempt, ran
from disttrain_operator.decide.finished import is_finished
from disttrain_operator.decide.observed import Admission, Job, ReadableJob, in_words
from disttrain_operator.gate_cycle import ClusterSnapshot, GateDecision, WaitingJob, decide_gangs
from disttrain_operator.kept_cluster import trim_cluster_pod, trim_node
from disttrain_operator.kube.cache import Cache, Raw
from disttrain_operator.snapshot import World

logger = logging.getLogger(__name__)

LONGEST_HOLD = timedelta(hours=4)
FIRST_REST = 0.02
REST_PER_SECOND_OF_WORK = 10.0
REST_AFTER_FAILURE = 5.0
MAX_OFFERED = 1000
"""Resources of nodes that are known by name."""
# Between two turns of the loop.
READING_SECONDS = 0.005
# A busy cluster changes the numbers all the time; each change of a sentence is a request.
SENTENCE_SECONDS = 30.0

_ALL = "all"


class Gatekeeper:
    """Fill `nodes` and `pods` by informers of the whole cluster. `wake` is called with the uid of a job that is to be
    reconciled."""

    def __init__(
        self,
        world: World,
        wake: Callable[[str], None],
        active: Callable[[], bool] = lambda: True,
        *,
        longest_hold: timedelta = LONGEST_HOLD,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """`longest_hold`: for how long gangs that wait keep nodes from others at a stretch."""
        self._world, self._wake, self._active = world, wake, active
        self._longest_hold, self._now = longest_hold, now
        self._offered: set[str] = set()
        """Resources that nodes have, or had: the first `MAX_OFFERED`."""
        self.nodes = Cache(
            group_of=lambda raw: _ALL, trim=self._trim_node, on_change=self._changed, budget=world.budget
        )
        self.pods = Cache(
            group_of=lambda raw: _ALL,
            trim=lambda raw: trim_cluster_pod(raw, self._offered),
            on_change=self._changed,
            gone_seconds=10,
            budget=world.budget,
        )
        self._answers: dict[str, Admission] = {}
        self._granted: dict[str, dict[str, str]] = {}
        self._last_reasons: dict[str, tuple[float, str]] = {}
        self._failures: dict[str, str] = {}
        self._waiting_since: datetime | None = None
        self._beginnings = 0
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._cycle: asyncio.Task[None] | None = None
        self._cycle_lock = asyncio.Lock()
        self._due = False
        self._closed = False

    def _trim_node(self, raw: Raw) -> Raw:
        kept = trim_node(raw)
        # A node may change its resources for ever.
        self._offered.update(islice(kept["node"].allocatable, MAX_OFFERED - len(self._offered)))
        return kept

    def admission(self, job: Job) -> Admission | None:
        """Return what is known of the job's gang; None if it does not use the gate."""
        if job.spec is None or job.spec.run_policy.scheduling_policy.gang_scheduler is not GangScheduler.GATE:
            return None
        return self._answers.get(job.uid, Admission())

    def begin(self) -> None:
        """This replica acts from now on. What it granted before, another may have given away since."""
        self._beginnings += 1
        self._granted.clear()
        self._answers.clear()
        self._waiting_since = None
        self._run_cycle_in(0)

    async def close(self) -> None:
        """Run no further cycle. Call it before the loop ends."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._cycle is not None:
            self._cycle.cancel()
            await asyncio.gather(self._cycle, return_exceptions=True)

    def _changed(self, group: str, raw: Raw) -> None:
        self._run_cycle_in(FIRST_REST)

    def _run_cycle_in(self, seconds: float) -> None:
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        at = max(loop.time() + seconds, self._not_before)
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._cycle is not None:
            self._due = True
        else:
            self._cycle = asyncio.get_running_loop().create_task(self._cycle_and_rest())

    async def _cycle_and_rest(self) -> None:
        rest = REST_AFTER_FAILURE
        try:
            rest = await self.run_cycle() * REST_PER_SECOND_OF_WORK
        except Exception:
            logger.exception("the gate tries again after an unexpected error")
            self._due = True
        finally:
            self._cycle = None
        self._not_before = asyncio.get_running_loop().time() + rest
        if self._due:
            self._due = False
            self._run_cycle_in(FIRST_REST)

    async def run_cycle(self) -> float:
        """Decide about all waiting gangs, and wake the jobs for which something changed. Returns the CPU seconds."""
        async with self._cycle_lock:
            began = self._beginnings
            jobs = await self._waiting_jobs() if self._active() and self.nodes.synced() and self.pods.synced() else []
            decision, seconds = GateDecision(), 0.0
            if jobs:
                decision, seconds = await asyncio.to_thread(_timed, self._snapshot(jobs))
            # Where this replica has begun to act anew meanwhile, another cycle is due.
            if began == self._beginnings:
                self._take_over(self._still_valid(decision, jobs) if self._active() else GateDecision())
            return seconds

    async def _waiting_jobs(self) -> list[WaitingJob]:
        """The jobs whose gangs wait, each read inside its own guard, a few in each turn of the loop."""
        found = []
        began = time.perf_counter()
        for uid in self._world.jobs.groups():
            raw = self._world.jobs.get(uid)
            if raw is None or not _asks_for_gate(raw):
                continue
            try:
                job = self._world.job(uid)
                if isinstance(job, ReadableJob) and _waits(job):
                    found.append(WaitingJob(job, raw["metadata"].get("creationTimestamp") or ""))
            except Exception as error:
                self._log_unread(uid, error)
            if time.perf_counter() - began > READING_SECONDS:
                await asyncio.sleep(0)
                began = time.perf_counter()
        return found

    def _snapshot(self, jobs: list[WaitingJob]) -> ClusterSnapshot:
        return ClusterSnapshot(
            jobs=jobs,
            known=self._world.jobs.objects(),
            pods=self.pods.objects(),
            nodes=self.nodes.objects(),
            granted={uid: dict(places) for uid, places in self._granted.items()},
            waiting_since=self._waiting_since,
            now=self._now(),
            longest=self._longest_hold,
        )

    def _still_valid(self, decision: GateDecision, jobs: list[WaitingJob]) -> GateDecision:
        """The decision without grants that the cluster has overtaken meanwhile: another cycle decides about them.

        What was granted before stays: its pods may be on their way.
        """
        decided = {waiting.job.uid: waiting.job for waiting in jobs}
        for uid, seen in decision.relied_on.items():
            if not self._still_waits(decided[uid]) or not all(self._is_same(raw) for raw in seen):
                decision.admissions[uid] = Admission(why=self._answers.get(uid, Admission()).why)
                self._run_cycle_in(FIRST_REST)
        return decision

    def _still_waits(self, decided: ReadableJob) -> bool:
        try:
            job = self._world.job(decided.uid)
        except Exception as error:
            self._log_unread(decided.uid, error)
            return False
        if not isinstance(job, ReadableJob) or not _waits(job):
            return False
        return (job.generation, job.status.attempt) == (decided.generation, decided.status.attempt)

    def _is_same(self, seen: Raw) -> bool:
        uid = seen["metadata"]["uid"]
        if "pod" in seen:
            pod = self.pods.get(uid)
            return pod is not None and pod["pod"] == seen["pod"]
        node = self.nodes.get(uid)
        return node is not None and node["node"] == seen["node"]

    def _take_over(self, decision: GateDecision) -> None:
        before = self._answers
        self._answers = {
            uid: self._with_steady_reason(uid, admission) for uid, admission in decision.admissions.items()
        }
        self._granted = {uid: dict(admission.nodes) for uid, admission in self._answers.items() if admission.nodes}
        for uid in self._last_reasons.keys() - self._answers.keys():
            del self._last_reasons[uid]
        for uid in [uid for uid in self._failures if self._world.jobs.get(uid) is None]:
            del self._failures[uid]
        for uid, why in decision.failures.items():
            self._log_failure(uid, why)
        self._waiting_since = decision.waiting_since
        if decision.period_ends is not None:
            self._run_cycle_in((decision.period_ends - self._now()).total_seconds())
        for uid in self._answers.keys() | before.keys():
            if self._answers.get(uid) != before.get(uid):
                self._wake(uid)

    def _with_steady_reason(self, uid: str, admission: Admission) -> Admission:
        """The admission, with the reason of a moment ago where only its numbers have changed since."""
        if not admission.why:
            self._last_reasons.pop(uid, None)
            return admission
        now = time.monotonic()
        since, last = self._last_reasons.get(uid, (float("-inf"), ""))
        if admission.why == last:
            return admission
        if now - since < SENTENCE_SECONDS:
            self._run_cycle_in(since + SENTENCE_SECONDS - now)
            return Admission(why=last)
        self._last_reasons[uid] = (now, admission.why)
        return admission

    def _log_unread(self, uid: str, error: Exception) -> None:
        self._log_failure(uid, f"it cannot be read ({in_words(error)})")

    def _log_failure(self, uid: str, why: str) -> None:
        """Once, in the log."""
        if self._failures.get(uid) != why:
            self._failures[uid] = why
            logger.warning("%s: %s; its gang waits, others do not", self._world.key_of(uid) or uid, why)


def _timed(snapshot: ClusterSnapshot) -> tuple[GateDecision, float]:
    began = time.thread_time()
    return decide_gangs(snapshot), time.thread_time() - began


def _asks_for_gate(raw: Raw) -> bool:
    """Whether it may be worth to read the job."""
    return bool(raw["begun"] and not raw["ran"] and raw["gang"] == GangScheduler.GATE)


def _waits(job: ReadableJob) -> bool:
    if job.spec.run_policy.scheduling_policy.gang_scheduler is not GangScheduler.GATE:
        return False
    return not job.deleting and in_attempt(job.status) and not ran(job.status) and not is_finished(job)
