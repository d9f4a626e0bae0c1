"""What the servers have counted, as metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from disttrain_trainer.parameter_server.client import Servers
from disttrain_trainer.parameter_server.group import GroupServers


@dataclass
class Rates:
    """Turns counters into figures since they were last asked for."""

    servers: Servers | GroupServers
    _at: float = field(default_factory=time.monotonic)
    _pushes: int = 0
    _pulls: int = 0
    _pulled_bytes: int = 0
    _staleness: dict[int, int] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Keys of metrics.jsonl. Rates are those of the busiest server; staleness is of the pushes since last time."""
        answers = [answer.fields for answer in self.servers.figures()]
        now = time.monotonic()
        seconds, self._at = max(now - self._at, 1e-9), now
        pushes, pulls = (max(one[name] for one in answers) for name in ("taken", "pulls"))
        # What a server has lost with its former life it has not done less.
        pushed, pulled = max(0, pushes - self._pushes), max(0, pulls - self._pulls)
        self._pushes, self._pulls = pushes, pulls
        found = {
            "servers/version_min": min(one["version"] for one in answers),
            "servers/version_max": max(one["version"] for one in answers),
            "servers/pushes_per_second": pushed / seconds,
            "servers/pulls_per_second": pulled / seconds,
            "servers/late_pushes": sum(one["late"] for one in answers),
            "servers/dropped_messages": sum(one["dropped"] for one in answers),
            "servers/live_workers": answers[0]["live"],
            "servers/lost_pushes": max(self.servers.lost),
            "servers/pulled_bytes": self.servers.pulled_bytes - self._pulled_bytes,
            "servers/epoch": sum(one["server"]["epoch"] for one in answers),
        }
        for name in ("slowest_worker", "slowest_ratio"):
            if name in answers[0]:
                found[f"servers/{name}"] = answers[0][name]
        self._pulled_bytes = self.servers.pulled_bytes
        return {name: float(value) for name, value in (found | self._of_staleness(answers[0]["staleness"])).items()}

    def _of_staleness(self, histogram: dict[str, int]) -> dict[str, float]:
        """Mean and largest, and the histogram itself: pushes of each staleness; of server 0, which sees all of them."""
        total = {int(key): count for key, count in histogram.items()}
        if any(count > total.get(key, 0) for key, count in self._staleness.items()):
            # Server 0 was started anew and counts from nothing.
            self._staleness = {}
        new = {key: count - self._staleness.get(key, 0) for key, count in total.items()}
        self._staleness = total
        new = {key: count for key, count in sorted(new.items()) if count}
        if not new:
            return {}
        mean = sum(key * count for key, count in new.items()) / sum(new.values())
        return {
            "servers/staleness_mean": mean,
            "servers/staleness_max": max(new),
            **{f"servers/staleness/{key}": count for key, count in new.items()},
        }
