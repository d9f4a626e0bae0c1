"""Counts of the servers, as metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from disttrain_trainer.parameter_server.protocol.counters import WorkerCounters, counters_of, total_of
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.group import GroupServers

MAX_REPORTED_WORKERS = 64
"""With more of them a line would be mostly theirs; the slowest is named in any case."""


class CounterMetrics:
    """Turns what servers count from their beginning into figures since they were last asked for."""

    def __init__(self, servers: Servers | GroupServers, clock: Callable[[], float] = time.monotonic) -> None:
        self.servers, self._clock, self._at = servers, clock, clock()
        self._pulled_bytes = 0
        self._instances: dict[int, str] = {}
        self._counters: dict[int, dict[int, WorkerCounters]] = {}
        self._staleness: dict[int, int] = {}

    def figures(self) -> dict[str, float]:
        """Keys of metrics.jsonl."""
        answers = [answer.fields for answer in self.servers.figures()]
        now = self._clock()
        seconds, self._at = max(now - self._at, 1e-9), now
        for server, answer in enumerate(answers):
            self._reset_if_restarted(server, answer["server"]["instance"])
        counters = [self._new_of(server, counters_of(answer["counters"])) for server, answer in enumerate(answers)]
        found = {
            **self._of_all(answers),
            **self._of_staleness(answers[0]["staleness"]),
            **self._of_servers(answers, counters, seconds),
            **self._of_workers(counters, seconds),
        }
        return {name: float(value) for name, value in found.items()}

    def _reset_if_restarted(self, server: int, instance: str) -> None:
        """A server that was started anew counts from nothing."""
        if self._instances.get(server) != instance:
            self._instances[server] = instance
            self._counters.pop(server, None)
            self._staleness = {} if server == 0 else self._staleness

    def _new_of(self, server: int, counters: dict[int, WorkerCounters]) -> dict[int, WorkerCounters]:
        """Return a server's counts of each worker since the last call."""
        last, self._counters[server] = self._counters.get(server, {}), counters
        return {worker: total - last.get(worker, WorkerCounters()) for worker, total in counters.items()}

    def _of_all(self, answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        pulled_bytes, self._pulled_bytes = self.servers.pulled_bytes - self._pulled_bytes, self.servers.pulled_bytes
        found = {
            "servers/version_min": min(one["version"] for one in answers),
            "servers/version_max": max(one["version"] for one in answers),
            "servers/late_pushes": sum(one["late"] for one in answers),
            "servers/dropped_messages": sum(one["dropped"] for one in answers),
            "servers/live_workers": answers[0]["live"],
            "servers/lost_pushes": max(self.servers.lost),
            "servers/pulled_bytes": pulled_bytes,
            "servers/incarnations": sum(one["server"]["incarnation"] for one in answers),
        }
        named = ("slowest_worker", "slowest_ratio")
        return found | {f"servers/{name}": answers[0][name] for name in named if name in answers[0]}

    def _of_servers(
        self, answers: Sequence[Mapping[str, Any]], counters: Sequence[Mapping[int, WorkerCounters]], seconds: float
    ) -> dict[str, float]:
        """Return the figures of each server, and the rates of the busiest."""
        found: dict[str, float] = {}
        for server, (answer, of_workers) in enumerate(zip(answers, counters, strict=True)):
            found[f"servers/{server}/version"] = answer["version"]
            found |= _rates_of(f"servers/{server}", total_of(of_workers.values()), seconds)
        for name in ("pushes_per_second", "pulls_per_second"):
            found[f"servers/{name}"] = max(found[f"servers/{server}/{name}"] for server in range(len(answers)))
        return found

    def _of_workers(self, counters: Sequence[Mapping[int, WorkerCounters]], seconds: float) -> dict[str, float]:
        """Return the figures of each worker, if there are not too many. A push and a pull go to all servers: counts are
        of server 0."""
        workers = sorted({worker for one in counters for worker in one})
        if len(workers) > MAX_REPORTED_WORKERS:
            return {}
        found: dict[str, float] = {}
        for worker in workers:
            first = counters[0].get(worker, WorkerCounters())
            total = total_of(one.get(worker, WorkerCounters()) for one in counters)
            new = replace(first, pushed_bytes=total.pushed_bytes, pulled_bytes=total.pulled_bytes)
            found |= _rates_of(f"workers/{worker}", new, seconds)
        return found

    def _of_staleness(self, histogram: Mapping[str, int]) -> dict[str, float]:
        """Mean and largest, and the histogram itself: pushes of each staleness; of server 0, which sees all of them."""
        total = {int(key): count for key, count in histogram.items()}
        new = {key: count - self._staleness.get(key, 0) for key, count in total.items()}
        self._staleness = total
        new = {key: count for key, count in sorted(new.items()) if count}
        if not new:
            return {}
        return {
            "servers/staleness_mean": sum(key * count for key, count in new.items()) / sum(new.values()),
            "servers/staleness_max": max(new),
            **{f"servers/staleness/{key}": count for key, count in new.items()},
        }


def _rates_of(prefix: str, new: WorkerCounters, seconds: float) -> dict[str, float]:
    """Keys of what a server or worker has done within these seconds."""
    found: dict[str, float] = {
        f"{prefix}/pushes_per_second": new.pushes / seconds,
        f"{prefix}/pulls_per_second": new.pulls / seconds,
        f"{prefix}/pushed_bytes": new.pushed_bytes,
        f"{prefix}/pulled_bytes": new.pulled_bytes,
    }
    if new.pushes:
        found[f"{prefix}/staleness_mean"] = new.staleness / new.pushes
    return found
