"""Jobs of a cluster as a source of pages, read with the rights of the client that it is given."""

import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

from disttrain.client import Client
from disttrain.cluster.api import ApiError
from disttrain.cluster.events import readable_events
from disttrain.cluster.remote import RemoteJob
from disttrain.dashboard.past import Past, seen
from disttrain.errors import CommandError
from disttrain.logs.follow import lines_now
from disttrain.logs.pick import Pick
from disttrain.stacks.of_cluster import stacks_of
from disttrain.views.why import why
from disttrain_api.history import HistoryEntry
from disttrain_dashboard.app import MAX_LINE
from disttrain_dashboard.source import Job, Listing, Seen, SourceError, UnknownJobError
from disttrain_dashboard.views.curves import Curves, Panel
from disttrain_dashboard.views.listing import MAX_JOBS
from disttrain_dashboard.views.ranks import MAX_RANKS, ranks_of_pods, ranks_per_pod

FRESH_SECONDS = 5.0
LONGEST_SECONDS = 60.0
"""A right that was taken from its owner shows after this time at the latest."""
SHARE = 10
"""Requests take at most one part in so many of the time: a list of thousands of jobs or pods is work for the API
server."""
POINTS = 120
"""The most points of a curve."""
_MOST_LINES = 5000
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


class Figures:
    """Curves of the jobs that were looked at last, since a cluster keeps none.

    Several people may share them: they are asked for with a job that the API server has just shown to who asks.
    """

    def __init__(self, most: int = MAX_JOBS) -> None:
        self._most, self._lock = most, threading.Lock()
        self._by_uid: OrderedDict[str, Curves] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_uid)

    def learn(self, jobs: Sequence[RemoteJob]) -> None:
        """Take the figures of jobs as they are now."""
        with self._lock:
            for job in jobs:
                self._take(job)

    def panels(self, job: RemoteJob) -> list[Panel]:
        """Return what is known of a job by now."""
        with self._lock:
            return self._take(job).panels()

    def _take(self, job: RemoteJob) -> Curves:
        curves = self._by_uid.setdefault(job.uid, Curves(POINTS))
        self._by_uid.move_to_end(job.uid)
        known = job.status.progress
        if known is not None:
            curves.add_progress(known.step, known.loss, known.samples_per_second)
        if len(self._by_uid) > self._most:
            self._by_uid.popitem(last=False)
        return curves


class ClusterJobs:
    """Jobs of all namespaces, or of some."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[str] = (),
        *,
        title: str = "",
        figures: Figures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """namespaces: none: all."""
        self._client, self._namespaces, self._clock = client, namespaces, clock
        self._figures = Figures() if figures is None else figures
        self._past = Past(client, namespaces)
        self.seconds = FRESH_SECONDS
        self.title = title or f"Jobs of {in_words(namespaces)} at {client.api.server}"

    def jobs(self) -> Listing:
        """Return the first jobs in the order of their namespaces and names, and those that were deleted."""
        with self._asking() as now:
            found, more = self._all() if not self._namespaces else self._some()
            past = self._past.listed({job.uid for job in found}, max(MAX_JOBS - len(found), 0), now)
        self._figures.learn(found[:MAX_JOBS])
        if len(found) > MAX_JOBS:
            more.insert(0, f"The first {MAX_JOBS} jobs are shown, and there are more.")
        return Listing([*map(_job, found[:MAX_JOBS]), *past], " ".join(more))

    def _all(self) -> tuple[list[RemoteJob], list[str]]:
        return self._client.list(all_namespaces=True, most=MAX_JOBS + 1), []

    def _some(self) -> tuple[list[RemoteJob], list[str]]:
        """Return the jobs, and a sentence for each namespace that may not be read. Raises what the last one raised
        where that is so of all."""
        found: list[RemoteJob] = []
        refused: list[ApiError] = []
        for namespace in self._namespaces:
            if len(found) > MAX_JOBS:
                break
            try:
                found += Client.of(self._client.api, namespace).list(most=MAX_JOBS + 1 - len(found))
            except ApiError as error:
                if error.status != 403:
                    raise
                refused.append(error)
        if len(refused) == len(self._namespaces):
            raise refused[-1]
        return found, [f"{error}." for error in refused]

    def job(self, key: str) -> Seen:
        """Return a job with its pods, and the Events on it and on the first pod that does not start."""
        with self._asking():
            job = self._get(key)
            if isinstance(job, HistoryEntry):
                # It shows no curves: anybody who may change the ConfigMap may write the uid of any job into it.
                return seen(job)
            pods = self._client.pods(job, most=MAX_RANKS)
            events = readable_events(self._client, job)
            unstarted = next((pod for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"), None)
            if unstarted is not None:
                events += readable_events(self._client, job, str(unstarted["metadata"]["uid"]))
        found = why(job, pods, events, datetime.now(UTC))
        ranks = ranks_of_pods(pods, job.raw.get("spec"), job.status.attempt)
        return Seen(_job(job), found.paragraph, found.todo, ranks, events, self._figures.panels(job))

    def log(self, key: str, rank: int, tail: int) -> Sequence[str]:
        """Return the last lines of a rank of the current attempt."""
        with self._asking():
            job = self._get(key)
            if isinstance(job, HistoryEntry):
                raise SourceError(f"{job.namespace}/{job.name} was deleted, and its pods with it", 404)
            lines = min(tail * ranks_per_pod(job.raw.get("spec")), _MOST_LINES)
            found = lines_now(self._client, job, Pick(ranks=frozenset({rank})), tail=lines)
            return list(deque((line.content[:MAX_LINE] for line in found), maxlen=tail))

    def stacks(self, key: str, rank: int) -> str:
        """Return where a rank of the current attempt is. It takes more rights than all else here: `stacks_of`."""
        with self._asking():
            job = self._get(key)
            if isinstance(job, HistoryEntry):
                raise SourceError(f"{job.namespace}/{job.name} was deleted, and its pods with it", 404)
            pods = self._client.pods(job, most=MAX_RANKS)
            taken = stacks_of(self._client.api, job, pods, frozenset({rank}))
            if rank not in taken.found:
                raise CommandError(" ".join(taken.missing) or f"rank {rank} gives no stacks now")
            return taken.found[rank]

    @contextmanager
    def _asking(self) -> Iterator[float]:
        """Yield the time, and let the answer hold as long as it has cost. Raises SourceError for what the client
        raises."""
        began = self._clock()
        try:
            yield began
        except CommandError as error:
            refused = isinstance(error, ApiError) and error.status in (401, 403)
            raise SourceError(str(error), error.status if refused else 503) from error
        finally:
            self.seconds = min(max(FRESH_SECONDS, SHARE * (self._clock() - began)), LONGEST_SECONDS)

    def _get(self, key: str) -> RemoteJob | HistoryEntry:
        """Return the job; of one that is gone what the history has. Raises UnknownJobError."""
        namespace, _, name = key.partition("/")
        name, _, uid = name.partition("/")
        if not (name and _NAMESPACE.fullmatch(namespace)) or (self._namespaces and namespace not in self._namespaces):
            raise UnknownJobError
        if not uid:
            try:
                return self._client.get(name, namespace=namespace)
            except ApiError as error:
                if error.status != 404:
                    raise
        entry = self._past.find(namespace, name, uid or None)
        if entry is None:
            raise UnknownJobError
        return entry


def in_words(namespaces: Sequence[str]) -> str:
    """Return these namespaces, or "all namespaces" for none."""
    if not namespaces:
        return "all namespaces"
    return f"namespace{'s' if len(namespaces) > 1 else ''} {', '.join(namespaces)}"


def _job(job: RemoteJob) -> Job:
    return Job(f"{job.namespace}/{job.name}", job.raw, phase=job.phase)
