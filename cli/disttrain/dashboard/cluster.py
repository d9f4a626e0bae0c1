"""Jobs of a cluster as a source of pages, read with the rights of the user's kubeconfig."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from disttrain.client import Client
from disttrain.cluster.api import ApiError
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain.jobs import readable_events
from disttrain.logs.follow import lines_now
from disttrain.logs.pick import Pick
from disttrain.views.why import why
from disttrain_dashboard.source import Job, Listing, Seen, SourceError, UnknownJobError
from disttrain_dashboard.views.curves import Curves
from disttrain_dashboard.views.listing import MAX_JOBS
from disttrain_dashboard.views.ranks import MAX_RANKS, ranks_of_pods, ranks_per_pod

FRESH_SECONDS = 5.0
SHARE = 10
"""Requests take at most one part in so many of the time: a list of thousands of jobs or pods is work for the API
server."""
POINTS = 120
"""The most points of a curve. The command keeps what it has seen, since a cluster keeps no curves."""
_MOST_LINES = 5000


class ClusterJobs:
    """Jobs of one namespace, or of all."""

    def __init__(self, client: Client, *, everywhere: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._everywhere, self._clock = client, everywhere, clock
        self._curves: dict[str, Curves] = {}
        self._lock = threading.Lock()
        """Guards the curves, since several threads make answers."""
        self.seconds = FRESH_SECONDS
        where = "all namespaces" if everywhere else f"namespace {client.namespace}"
        self.title = f"Jobs of {where} at {client.api.server}"

    def jobs(self) -> Listing:
        """Return the first jobs in the order of their names."""
        with self._asking():
            found = self._client.list(all_namespaces=self._everywhere, most=MAX_JOBS + 1)
        with self._lock:
            for job in found:
                self._learn(job)
            self._curves = {job.uid: self._curves[job.uid] for job in found}
        more = f"The first {MAX_JOBS} jobs are shown, and there are more." if len(found) > MAX_JOBS else ""
        return Listing([_job(job) for job in found[:MAX_JOBS]], more)

    def job(self, key: str) -> Seen:
        """Return a job with its pods, and the Events on it and on the first pod that does not start."""
        with self._asking():
            job = self._get(key)
            pods = self._client.pods(job, most=MAX_RANKS)
            events = readable_events(self._client, job)
            unstarted = next((pod for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"), None)
            if unstarted is not None:
                events += readable_events(self._client, job, str(unstarted["metadata"]["uid"]))
        found = why(job, pods, events, datetime.now(UTC))
        ranks = ranks_of_pods(pods, job.raw.get("spec"), job.status.attempt)
        with self._lock:
            panels = self._learn(job).panels()
        return Seen(_job(job), found.paragraph, found.todo, ranks, events, panels)

    def log(self, key: str, rank: int, tail: int) -> Sequence[str]:
        """Return the last lines of a rank of the current attempt."""
        with self._asking():
            job = self._get(key)
            lines = min(tail * ranks_per_pod(job.raw.get("spec")), _MOST_LINES)
            found = lines_now(self._client, job, Pick(ranks=frozenset({rank})), tail=lines)
            return [line.content for line in deque(found, maxlen=tail)]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Let the answer hold as long as it has cost. Raises SourceError for what the client raises."""
        began = self._clock()
        try:
            yield
        except CommandError as error:
            raise SourceError(str(error)) from error
        finally:
            self.seconds = max(FRESH_SECONDS, SHARE * (self._clock() - began))

    def _get(self, key: str) -> RemoteJob:
        namespace, _, name = key.partition("/")
        if not name or not namespace or not (self._everywhere or namespace == self._client.namespace):
            raise UnknownJobError
        try:
            return self._client.get(name, namespace=namespace)
        except ApiError as error:
            if error.status == 404:
                raise UnknownJobError from error
            raise

    def _learn(self, job: RemoteJob) -> Curves:
        curves = self._curves.setdefault(job.uid, Curves(POINTS))
        known = job.status.progress
        if known is not None:
            curves.add_progress(known.step, known.loss, known.samples_per_second)
        return curves


def _job(job: RemoteJob) -> Job:
    return Job(f"{job.namespace}/{job.name}", job.raw, phase=job.phase)
