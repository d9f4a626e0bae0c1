"""Logs of several pods, merged: as they are now, or followed through pending pods and restarts to the job's end."""

import heapq
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from disttrain.cluster.api import Api, ApiError, NoAnswer, Raw
from disttrain.cluster.paths import path_of
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain.logs.pick import Line, Pick, PodLog, line_of, newest, picked
from disttrain_api.names import CONTAINER
from disttrain_api.status import ConditionType

MAX_STREAMS = 64
"""Pods whose logs are read at once."""
_LOOK_SECONDS = 2.0
_SILENCE_SECONDS = 300.0
"""A log that is followed may be silent for so long."""
_ANSWER_SECONDS = 60.0
_KEPT_LINES = 10_000


class Jobs(Protocol):
    """The part of a client that is used."""

    api: Api

    def get(self, name: str, *, namespace: str | None = None) -> RemoteJob: ...
    def pods(self, job: RemoteJob) -> list[Raw]: ...


def lines_now(jobs: Jobs, job: RemoteJob, pick: Pick, *, tail: int | None = None) -> Iterator[Line]:
    """Yield the lines that there are, in the order of time. Raises CommandError where there is no log."""
    found = newest(picked(jobs.pods(job), job.raw.get("spec"), pick))
    started = [pod for pod in found if pod.started]
    if not started:
        raise CommandError(_no_log(job, found, pick))
    _refuse_many(started)
    streams = [_Stream(jobs.api, job, pod, pick, tail) for pod in started]
    return heapq.merge(*(stream.lines(follow=False) for stream in streams), key=lambda line: line.time)


def follow_lines(jobs: Jobs, job: RemoteJob, pick: Pick, *, tail: int | None = None) -> Iterator[Line]:
    """Yield lines as they come until the job has finished (an attempt that is picked: until it has ended)."""
    readers = _Readers(jobs, job, pick, tail)
    try:
        yield from readers.lines()
    finally:
        readers.stop()


def _no_log(job: RemoteJob, found: list[PodLog], pick: Pick) -> str:
    """Say why there is no log, and where to look instead."""
    whole = f"{job.namespace}/{job.name}"
    if found:
        running = job.condition(ConditionType.RUNNING)
        reason = f": {running.message}" if running is not None and running.status != "True" else ""
        return f"{whole}: no container of {len(found)} pods has started{reason}; wait with --follow"
    if pick.ranks is not None and job.status.world_size is not None and min(pick.ranks) >= job.status.world_size:
        return f"{whole} has ranks 0 to {job.status.world_size - 1}"
    if not job.status.attempt:
        return f"{whole} has no pods yet; `disttrain why {job.name}` says why, or wait with --follow"
    attempt = f" of attempt {pick.attempt}" if pick.attempt is not None else ""
    return (
        f"{whole}: the pods{attempt} are gone, and with them their logs; `disttrain why {job.name}` says how they"
        " ended. runPolicy.cleanPodPolicy: None and failureLogInStatus: true keep more"
    )


def _refuse_many(pods: list[PodLog]) -> None:
    if len(pods) > MAX_STREAMS:
        raise CommandError(f"{len(pods)} pods have logs, and {MAX_STREAMS} are read at once: pick some with --rank")


@dataclass
class _Stream:
    """The log of one pod. Lines that were given are not given again after a connection broke."""

    api: Api
    job: RemoteJob
    pod: PodLog
    pick: Pick
    tail: int | None
    _last: int = 0
    _at_last: int = 0

    def lines(self, *, follow: bool) -> Iterator[Line]:
        """Yield lines from the last one on. Raises CommandError."""
        path = path_of("/api/v1", "pods", self.job.namespace, self.pod.name, "log")
        query: dict[str, str | int] = {"container": CONTAINER, "timestamps": "true"}
        if follow:
            query["follow"] = "true"
        if self._last:
            seconds = self._last // 10**9
            query["sinceTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))
        elif self.tail is not None:
            query["tailLines"] = self.tail
        skip = self._at_last
        for raw in self.api.lines(
            path,
            query,
            silence=_SILENCE_SECONDS if follow else _ANSWER_SECONDS,
            what=f"cannot read the log of pod {self.pod.name}",
        ):
            line = line_of(self.pod, raw, Pick())
            assert line is not None
            if line.time and line.time < self._last:
                continue
            if line.time == self._last and skip:
                skip -= 1
                continue
            self._at_last = self._at_last + 1 if line.time == self._last else 1
            self._last = max(line.time, self._last)
            meant = line_of(self.pod, raw, self.pick)
            if meant is not None:
                yield meant


@dataclass
class _Readers:
    """A thread for each pod that has a log, and a look at the job and its pods every two seconds."""

    jobs: Jobs
    job: RemoteJob
    pick: Pick
    tail: int | None
    _lines: "queue.Queue[Line]" = field(default_factory=lambda: queue.Queue(_KEPT_LINES))
    _streams: dict[str, _Stream] = field(default_factory=dict)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)
    _done: set[str] = field(default_factory=set)
    _stopped: threading.Event = field(default_factory=threading.Event)
    _first: int | None = None
    """The attempt that was the newest at the first look."""

    def lines(self) -> Iterator[Line]:
        look_at = time.monotonic()
        over = False
        while True:
            if time.monotonic() >= look_at and not over:
                over = self._look()
                look_at = time.monotonic() + _LOOK_SECONDS
            try:
                yield self._lines.get(timeout=0.05 if over else max(look_at - time.monotonic(), 0.01))
            except queue.Empty:
                if over and not any(thread.is_alive() for thread in self._threads.values()) and self._lines.empty():
                    return

    def stop(self) -> None:
        self._stopped.set()

    def _look(self) -> bool:
        """Start readers of pods that have a log by now. Returns whether no more will come."""
        try:
            # The job first: pods of an attempt that had ended by then are in the list, or gone.
            job = self.jobs.get(self.job.name, namespace=self.job.namespace)
            found = picked(self.jobs.pods(self.job), self.job.raw.get("spec"), self.pick)
        except NoAnswer:
            return False
        except ApiError as error:
            if error.status == 404:
                return True
            if error.status in (401, 403):
                raise
            return False
        if self._first is None:
            self._first = max((pod.attempt for pod in found), default=job.status.attempt)
        if self.pick.attempt is None:
            found = [pod for pod in found if pod.attempt >= self._first]
        started = [pod for pod in found if pod.started and pod.uid not in self._done]
        _refuse_many([pod for pod in started if not pod.ended])
        for pod in started:
            if pod.uid not in self._threads or not self._threads[pod.uid].is_alive():
                self._start(pod)
        over = job.uid != self.job.uid or job.finished or self._attempt_is_over(job)
        return over and all(pod.uid in self._threads for pod in started)

    def _attempt_is_over(self, job: RemoteJob) -> bool:
        return self.pick.attempt is not None and job.status.attempt > self.pick.attempt

    def _start(self, pod: PodLog) -> None:
        stream = self._streams.setdefault(pod.uid, _Stream(self.jobs.api, self.job, pod, self.pick, self.tail))
        thread = threading.Thread(target=self._read, args=(stream, pod.ended), name=f"log {pod.name}", daemon=True)
        self._threads[pod.uid] = thread
        thread.start()

    def _read(self, stream: _Stream, ended: bool) -> None:
        """Read a log to its end. One that breaks off is read on at the next look."""
        try:
            for line in stream.lines(follow=True):
                if not self._give(line):
                    return
        except NoAnswer:
            return
        except CommandError:
            # The pod is gone.
            self._done.add(stream.pod.uid)
            return
        if ended:
            self._done.add(stream.pod.uid)

    def _give(self, line: Line) -> bool:
        while not self._stopped.is_set():
            try:
                self._lines.put(line, timeout=1.0)
                return True
            except queue.Full:
                continue
        return False
