"""One reconcile of one job: snapshot -> decide -> status, if its meaning changed -> actions and Events.

The status is written first, always: attempt and restart count stand there before a pod of the old gang is deleted or
one of the new gang is created, so a process that dies between any two requests is continued, not repeated. The write
carries the resourceVersion that the decision was made from. A stale write is answered with 409; then nothing is
executed, and the job is read and reconciled again, after its pods where its status is another one. A job whose newest
version cannot be read is left as it is, with its pods, until it can be: the known version is out of date. A job about
which there is nothing to do costs no request, and a write of figures alone no second decision. One of which the API
server takes no status, for its size or its values, is left alone longer and longer, with an Event.

Where many jobs of a namespace wait for its quota, one that comes is asked about first, by a pod that is not made: if it
would be refused, that is in the first status, and neither Service nor Secret is made for it. Until its turn comes it is
looked at when something of it has changed, and not because it was woken (resting.py).
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Protocol

from disttrain_api.bounds import cut
from disttrain_api.names import API_VERSION, KIND, Label, Reason
from disttrain_api.status import JobStatus
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreateSupport, Decision, Event
from disttrain_operator.decide.fallback_status import minimal_status, with_error
from disttrain_operator.decide.observed import Job, Observed, in_words
from disttrain_operator.events import post_event
from disttrain_operator.execute import Executor
from disttrain_operator.kept_job import read
from disttrain_operator.kube.again import take_in
from disttrain_operator.kube.cache import Raw, version_of
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import (
    ApiError,
    Conflict,
    ContentTooLarge,
    Invalid,
    KubeError,
    NotFound,
    StandingBy,
    Undecodable,
)
from disttrain_operator.kube.slots import Slots
from disttrain_operator.kube.tolerant import MAX_WHY, Unreadable
from disttrain_operator.news import figures_alone, same_meaning
from disttrain_operator.queue import WorkQueue
from disttrain_operator.refused import Refused
from disttrain_operator.resting import Resting
from disttrain_operator.snapshot import NO_SOURCES, Basis, Key, Sources, World, core_collection, job_collection

logger = logging.getLogger(__name__)

# A job of thousands of pods is reconciled less often than its pods change: it gets a fifth of the time at most, and
# where nothing came of it a twentieth. The end of a pod waits for no rest.
REST_PER_SECOND_OF_WORK = 4.0
REST_AFTER_NO_NEWS = 19.0
MAX_REST_SECONDS = 5.0
# Clocks step; requeue_at is a time of the wall clock, the queue's are not.
MAX_REQUEUE_SECONDS = 300.0
CRASH_SECONDS = 5.0
MAX_CRASH_SECONDS = 120.0
# A key that fails for days would make the power itself grow beyond all bounds.
_MAX_DOUBLINGS = 10

_MAX_REFUSAL = 500
_TOO_LARGE = "The job is larger than the API server can store: delete it, or shorten its `spec` and `metadata`."
_NOT_TAKEN = "Is the CustomResourceDefinition that of the operator's release? `helm upgrade` brings both to one."

Decide = Callable[[Job, Observed, datetime], Decision]


class Recorder(Protocol):
    """Receiver of completed actions: the metrics."""

    def wrote_status(self, old: JobStatus, new: JobStatus) -> None: ...
    def made_pods(self, uid: str, attempt: int) -> None: ...


@dataclass(frozen=True)
class _Decided:
    """A decision about a job, and its time."""

    job: Job
    decision: Decision
    now: datetime
    basis: Basis | None

    @cached_property
    def news(self) -> JobStatus | None:
        """The status, if it means something else than the job's."""
        status = self.decision.status
        return None if status is None or same_meaning(status, self.job.status) else status

    @cached_property
    def is_final(self) -> bool:
        """Whether it leads to nothing but a status on which the same would be decided."""
        return self.news is not None and not self.decision.actions and figures_alone(self.news, self.job.status)


class StatusRefused(KubeError):  # noqa: N818 - as the others of kube/errors.py
    """The API server takes neither the status of a job nor the minimal one, and will not while they are the same."""

    def __init__(self, job: Job, refusal: ApiError) -> None:
        super().__init__(str(refusal))
        self.job, self.refusal = job, refusal


class Reconciler:
    """Reconciles jobs. While `active()` is false it only watches: another replica leads."""

    def __init__(
        self,
        client: Client,
        world: World,
        executor: Executor,
        queue: WorkQueue[Key],
        refused: Refused | None = None,
        sources: Sources = NO_SOURCES,
        *,
        active: Callable[[], bool] = lambda: True,
        recorder: Recorder | None = None,
        decide: Decide = decide,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._client, self._world, self._executor, self._queue = client, world, executor, queue
        self._active, self._recorder, self._decide, self._now = active, recorder, decide, now
        self._sources, self.refused = sources, refused or Refused()
        self._resting = Resting(world, self.refused, now)
        self._reading = Slots(1)
        self._reported_refusals: dict[str, int] = {}
        """Uid of a job whose status was refused -> generation of which that was reported."""
        self._outdated: dict[str, JobStatus] = {}
        """Uid of a job that somebody else had written before its status was -> the status that was known of it."""

    async def work(self) -> None:
        """One worker. Never returns, whatever a job does to it."""
        while True:
            key = await self._queue.get()
            try:
                await self._look(key)
                # A look may wait for nothing. With each the loop turns, while the key counts as one of its namespace's
                # that are out: so no backlog stands before what others send meanwhile.
                await asyncio.sleep(0)
            finally:
                self._queue.done(key)

    async def _look(self, key: Key) -> None:
        try:
            await self.reconcile(key)
        except StandingBy as error:
            logger.info("%s: left to the replica that acts: %s", key, error)
        except StatusRefused as error:
            self._leave(key)
            await self._report_refused(error)
        except KubeError as error:
            logger.warning("%s: trying again: %s", key, error)
            self._queue.retry(key)
        except Exception as error:
            logger.exception("%s: left alone for a while after an unexpected error", key)
            self._leave(key)
            await self._report_error(key, error)

    async def reconcile(self, key: Key) -> None:
        """Reconcile the job once."""
        if not self._active() or self._world.jobs.is_unreadable(key.uid):
            return
        if rest := self._resting.seconds_left(key):
            self._queue.add(key, min(rest, MAX_REQUEUE_SECONDS))
            return
        reading = await self._read_ahead(key)
        await self._see_new_pods(key)
        if not self._active():
            return
        decided = self._decide_now(key, reading)
        refused_now = decided is not None and await self._refused_ahead(key, decided)
        if refused_now:
            # Much may have happened meanwhile, and the refusal is known by now.
            decided = self._decide_now(key, 0.0)
        if decided is None or not self._active():
            return
        job, decision, now = decided.job, decided.decision, decided.now

        version = None
        if decided.news is not None:
            version = await self._write_status(job, decided.news, quietly=decided.is_final)
            if version is None:
                self._outdated[key.uid] = job.status
                await self._read_again(key)
                return
            logger.info("%s: %s: %s", key, decision.reason, decision.message)
        others_first = self.refused.seconds_left(key, job.generation)
        try:
            complete = await self._executor.execute(job, decision.actions, create=not others_first)
        finally:
            # Last: of many jobs that begin at once the pods matter more.
            if version is not None:
                events = decision.events
                await asyncio.gather(*(post_event(self._client, job, version, event, now) for event in events))
        if complete:
            self._queue.forget(key)
            self._resting.forget(key.uid)
            self._queue.try_now(self.refused.served(key))
            self._report_pods(job, decision)
        elif refused_now:
            self._queue.retry(key, at_least=others_first)
        elif others_first:
            self._queue.add(key, others_first)
        else:
            self._queue.retry(key, at_least=self.refused.again(key, job.generation))
        if not complete:
            self._resting.note(job, decision, decided.basis, version)
        if decision.requeue_at is not None:
            delay = (decision.requeue_at - self._now()).total_seconds()
            self._queue.add(key, min(max(delay, 0.0), MAX_REQUEUE_SECONDS))

    async def _see_new_pods(self, key: Key) -> None:
        """List the job's pods where another replica has written its status: those that it has made would look lost."""
        former = self._outdated.get(key.uid)
        if former is not None and (job := self._world.job(key.uid)) is not None and job.status != former:
            path, selector = core_collection("pods", key.namespace), f"{Label.JOB_UID}={key.uid}"
            await take_in(self._client, self._world.pods, path, selector)
        self._outdated.pop(key.uid, None)

    def _decide_now(self, key: Key, seconds: float) -> "_Decided | None":
        """Decide from what is known now; None where the job is gone. `seconds` were spent for it before."""
        began = time.perf_counter() - seconds
        seen = self._world.snapshot(key.uid, self._sources)
        if seen is None:
            self._executor.forget(key.uid)
            self._queue.drop(key)
            self.refused.forget(key)
            self._reported_refusals.pop(key.uid, None)
            self._resting.forget(key.uid)
            return None
        job, observed = seen
        if job.unread is not None:
            logger.warning("%s: left alone: %s", key, job.unread)
        now = self._now()
        decision = self._decide(job, observed, now)
        decided = _Decided(job, decision, now, self._world.basis(key.uid))
        self._rest(key, time.perf_counter() - began, decided)
        return decided

    def _rest(self, key: Key, seconds: float, decided: "_Decided") -> None:
        """Let the key rest after a look that took so many seconds."""
        least = rest = seconds * REST_PER_SECOND_OF_WORK
        if decided.news is None and not decided.decision.actions:
            due = decided.decision.requeue_at
            until = math.inf if due is None else (due - decided.now).total_seconds()
            rest = min(seconds * REST_AFTER_NO_NEWS, max(least, until))
        self._queue.hold(key, min(rest, MAX_REST_SECONDS), urgent_seconds=min(least, MAX_REST_SECONDS))

    async def _refused_ahead(self, key: Key, decided: "_Decided") -> bool:
        """Whether the job would be refused its pods now, in a namespace in which many wait. Then it waits with them."""
        job = decided.job
        if not self.refused.crowded(key.namespace) or self.refused.seconds_left(key, job.generation):
            return False
        if not await self._executor.refused_ahead(job, decided.decision.actions):
            return False
        self.refused.again(key, job.generation)
        return True

    async def _read_ahead(self, key: Key) -> float:
        """Read a long spec in a thread, one of all at a time: the loop goes on. Returns the seconds that it took."""
        if self._world.long_to_read(key.uid) is None:
            return 0.0
        async with self._reading.of(key.namespace):
            raw = self._world.long_to_read(key.uid)
            if raw is None or not self._active():
                return 0.0
            began = time.perf_counter()
            self._world.take(raw, await asyncio.to_thread(read, raw))
            return time.perf_counter() - began

    def _leave(self, key: Key) -> None:
        """Reconcile the key again later, after twice as long each time, whatever wakes it in the meantime."""
        doublings = min(self._queue.failures(key), _MAX_DOUBLINGS)
        self._queue.hold(key, min(CRASH_SECONDS * 2**doublings, MAX_CRASH_SECONDS))
        self._queue.retry(key)

    async def _report_refused(self, error: StatusRefused) -> None:
        """If the status cannot report it, report it in an Event and the log, once for each spec."""
        job, refusal = error.job, error.refusal
        if self._reported_refusals.get(job.uid) == job.generation:
            logger.debug("%s/%s: its status is refused again: %s", job.namespace, job.name, refusal)
            return
        self._reported_refusals[job.uid] = job.generation
        text = cut(refusal.message, _MAX_REFUSAL)
        logger.warning(
            "%s/%s: the API server refuses every status of it, so nothing is done for it: %s",
            job.namespace,
            job.name,
            text,
        )
        reason, what_to_do = Reason.OPERATOR_ERROR, _NOT_TAKEN
        if isinstance(refusal, ContentTooLarge):
            reason, what_to_do = Reason.INVALID_SPEC, _TOO_LARGE
        message = (
            f"The API server refuses every status of this job, so the operator does nothing for it: {text}."
            f" {what_to_do}"
        )
        with suppress(Exception):
            event = Event(reason, message, warning=True)
            await post_event(self._client, job, job.resource_version, event, self._now())

    async def _report_error(self, key: Key, error: Exception) -> None:
        """In the job's status, if it can be written: its owner does not read the operator's log."""
        with suppress(Exception):
            job = self._world.job(key.uid)
            if job is not None and job.unread is None and self._active():
                status = with_error(job, in_words(error), self._now())
                if not same_meaning(status, job.status):
                    await self._put_status(job, status)

    async def _write_status(self, job: Job, status: JobStatus, *, quietly: bool) -> str | None:
        """The resourceVersion of the job with this status; None where it has changed meanwhile, or is gone. quietly:
        the write itself is no reason to look at the job again.

        Raises StatusRefused where not even a minimal status is taken.
        """
        try:
            return await self._put_status(job, status, quietly=quietly)
        except Invalid as error:
            refusal = error
        kept = minimal_status(status, job.status, refusal.message)
        if same_meaning(kept, job.status):
            return job.resource_version
        try:
            version = await self._put_status(job, kept)
        except Invalid as error:
            raise StatusRefused(job, error) from error
        logger.warning("%s/%s: wrote a minimal status: %s", job.namespace, job.name, cut(str(refusal)))
        return version

    async def _put_status(self, job: Job, status: JobStatus, *, quietly: bool = False) -> str | None:
        path = f"{job_collection(job.namespace)}/{job.name}/status"
        with self._world.quiet_write(job.uid) if quietly else nullcontext(_nothing) as note_own:
            try:
                raw = await self._client.replace(path, status_body(job, status), trim=self._world.jobs.trimmed)
            except (Conflict, NotFound, Undecodable) as error:
                logger.debug("%s/%s: reading again: %s", job.namespace, job.name, error)
                return None
            note_own(raw)
            self._world.jobs.observe(raw)
        self._reported_refusals.pop(job.uid, None)
        if self._recorder is not None:
            self._recorder.wrote_status(job.status, status)
        version: str = raw["metadata"]["resourceVersion"]
        return version

    def _report_pods(self, job: Job, decision: Decision) -> None:
        support = [action for action in decision.actions if isinstance(action, CreateSupport)]
        if self._recorder is not None and support:
            self._recorder.made_pods(job.uid, support[0].attempt)

    async def _read_again(self, key: Key) -> None:
        try:
            path = f"{job_collection(key.namespace)}/{key.name}"
            raw = await self._client.get(path, trim=self._world.jobs.trimmed)
        except NotFound as error:
            # Without a reason it is the kind that is missing: the server is starting, or the CRD is being replaced.
            known = self._world.jobs.get(key.uid)
            if error.reason == "NotFound" and known is not None:
                self._world.jobs.observe_deleted(known)
        except Undecodable as error:
            # Nothing is tried again: a version that can be read comes by itself.
            known = self._world.jobs.get(key.uid)
            if known is not None:
                found = Unreadable(key.namespace, key.name, key.uid, version_of(known), cut(str(error), MAX_WHY))
                self._world.jobs.skip(found)
            return
        else:
            known = self._world.jobs.get(key.uid)
            if raw["metadata"]["uid"] != key.uid and known is not None:
                self._world.jobs.observe_deleted(known)
            self._world.jobs.observe(raw)
        self._queue.retry(key)


def _nothing(raw: Raw) -> None:
    """Nothing is to be noted of an answer."""


def status_body(job: Job, status: JobStatus) -> dict[str, Any]:
    """A PUT to /status: the API server takes nothing but the status from it, and checks uid and resourceVersion."""
    metadata = {
        "name": job.name,
        "namespace": job.namespace,
        "uid": job.uid,
        "resourceVersion": job.resource_version,
    }
    written = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": written}
