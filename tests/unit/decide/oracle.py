"""An independent count of the restarts that a job has used: from the history of what was seen, never from the status.

It is kept as a bookkeeper would: every checkpoint that a pod reported, with its attempt, and every restart, in order.
The count is then the number of counted restarts since the newest checkpoint was made.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from disttrain_api.status import JobStatus
from disttrain_operator.decide.observed import Observed

_CLUSTER = {"Preempted", "Drained", "Evicted", "NodeLost"}

RULES = [
    {"action": "RestartPod", "onExitCodes": {"operator": "In", "values": [42]}},
    {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [43]}},
    {"action": "RestartWithoutCounting", "onExitCodes": {"operator": "In", "values": [44]}},
]
"""The failure policy of jobs that have one."""


def most_lost(status: dict[str, Any]) -> int:
    """The most counted losses of pods in an attempt without a new checkpoint between them, where all wait for them."""
    counts = [
        Counter(entry.get("checkpointStep") for entry in attempt.get("replacements", []) if entry.get("counted"))
        for attempt in status.get("attempts", [])
    ]
    return max((count for each in counts for count in each.values()), default=0)


@dataclass
class Budget:
    """What happened to one job."""

    in_place: bool = False
    """Its ranks restart in place, so pods that are lost have a count of their own."""
    newest: int = 0
    made_in: int = 0
    """The attempt that made the newest checkpoint."""
    ends: dict[int, bool] = field(default_factory=dict)
    """By attempt: whether the restart that followed from its end counts."""
    singles: set[tuple[int, str]] = field(default_factory=set)
    """Counted restarts of single pods, by attempt and uid, since the newest checkpoint became known."""
    known_singles: set[tuple[int, str]] = field(default_factory=set)

    def see(self, observed: Observed, before: JobStatus, after: JobStatus) -> None:
        """A status was written, from what was observed."""
        self.observe(observed)
        for attempt in after.attempts:
            if attempt.end_time is not None:
                verdict = attempt.verdict
                self.ends[attempt.number] = verdict is not None and verdict.action == "RestartGang"
            for entry in attempt.replacements:
                if (attempt.number, entry.uid) not in self.known_singles:
                    self.known_singles.add((attempt.number, entry.uid))
                    if entry.reason not in _CLUSTER and not self.in_place:
                        self.singles.add((attempt.number, entry.uid))

    def observe(self, observed: Observed) -> None:
        """Pods have reported, or answered while they ran."""
        reports = [(pod.attempt, pod.report.progress) for pod in observed.pods if pod.report is not None]
        live = observed.live
        if live is not None and live.pod_uid in {
            pod.uid for pod in observed.pods if pod.program_started and pod.program_alive
        }:
            reports.append((live.attempt, live.report))
        for attempt, progress in sorted(reports, key=lambda entry: entry[0]):
            if progress is not None and progress.checkpoint is not None and progress.checkpoint.step > self.newest:
                self.newest, self.made_in = progress.checkpoint.step, attempt
                self.singles.clear()

    @property
    def used(self) -> int:
        """Counted restarts since the newest checkpoint."""
        gang = sum(counted for number, counted in self.ends.items() if number >= self.made_in)
        return gang + len(self.singles)
