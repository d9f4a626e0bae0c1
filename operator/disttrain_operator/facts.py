"""The facts that were read from jobs, for as long as there is room: reading a spec costs more than a decision.

As objects a job takes about ten times what is kept of it. So of jobs that rest those of the last few are kept that
were looked at, and of all others as many as `FACTS_BYTES` hold; the namespace that has most loses first those that were
read first. What is not here is read again when it is looked at.
"""

from collections import OrderedDict

from disttrain_operator.decide.observed import Job
from disttrain_operator.kube.cache import Raw

FACTS_BYTES = 64 * 2**20
KEPT_AT_REST = 256
"""Jobs that are finished or suspended and of which the facts are kept."""
LEAST_BYTES = 12 * 1024
"""What the shortest job takes."""


class Facts:
    """By the job's uid, with the version that they were read from."""

    def __init__(self, most: int = FACTS_BYTES) -> None:
        self._most, self.total = most, 0
        self._facts: dict[str, tuple[Raw, Job]] = {}
        self._in: dict[str, OrderedDict[str, int]] = {}
        """Namespace -> uid -> bytes, the oldest first."""
        self._sums: dict[str, int] = {}
        self._resting: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, uid: str) -> bool:
        return uid in self._facts

    def get(self, uid: str) -> tuple[Raw, Job] | None:
        """Return the version that was read last, and what was read; None where that is forgotten."""
        return self._facts.get(uid)

    def put(self, raw: Raw, job: Job) -> None:
        """Remember what was read from this version of a job; of others some may be forgotten for it."""
        self.forget(job.uid)
        self._facts[job.uid] = raw, job
        size = LEAST_BYTES + raw["parsed"]
        self._in.setdefault(job.namespace, OrderedDict())[job.uid] = size
        self._count(job.namespace, size)
        if raw["rests"]:
            self._resting[job.uid] = None
        while len(self._resting) > KEPT_AT_REST:
            self.forget(next(iter(self._resting)))
        while self.total > self._most and len(self._facts) > 1:
            namespace = max(self._sums, key=self._sums.__getitem__)
            # Never the one that is about to be looked at.
            oldest = next((uid for uid in self._in[namespace] if uid != job.uid), None)
            if oldest is None:
                oldest = next(uid for uid in self._facts if uid != job.uid)
            self.forget(oldest)

    def forget(self, uid: str) -> None:
        """The job is gone, or others need the room."""
        known = self._facts.pop(uid, None)
        if known is None:
            return
        self._resting.pop(uid, None)
        namespace = known[1].namespace
        self._count(namespace, -self._in[namespace].pop(uid))
        if not self._in[namespace]:
            del self._in[namespace], self._sums[namespace]

    def _count(self, namespace: str, change: int) -> None:
        self.total += change
        self._sums[namespace] = self._sums.get(namespace, 0) + change
