"""Jobs that were refused a child, by namespace: which try again, when, and how many at a time.

Where a quota is full there may be thousands. Each tries again after its own back-off, but the more wait in a namespace
the longer they wait, so that all of them together ask for little, whatever else has a job looked at meanwhile. A pod
that goes wakes the few whose last try is the longest ago; each of them that then has all it wants wakes the next few.
So what is asked follows from what became free, not from how many wait, and everybody's turn comes. Times pass while a
job waits for a worker, too: where many come whose time has passed one tries, and each other gets a time of its own.

A namespace in which more than a few wait is crowded: whoever comes there is asked about before anything is done for it
(reconcile.py), by few workers.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from disttrain_operator.snapshot import Key

WOKEN_AT_ONCE = 2
SECONDS_BETWEEN_TRIES = 0.1
FEW = 8
"""Jobs that wait in a namespace that is not crowded."""
SHARES = 4
WORKERS_IN_A_CROWD = 2
"""Each has a request or two under way, which the API server does ahead of those of others that come later."""


@dataclass
class _Waiting:
    """A job in its line."""

    key: Key
    generation: int
    """Generation of the spec that was refused."""
    until: float
    """When it may try again."""
    trying: bool = False
    """It was let try, and has not been refused since."""


@dataclass
class _Line:
    """The jobs of a namespace."""

    jobs: OrderedDict[str, _Waiting] = field(default_factory=OrderedDict)
    """By uid; the one whose last try is the longest ago first."""
    last_try: float = -math.inf
    """When one tried because its time had come."""
    last_time: float = -math.inf
    """The latest time that was given to one that came when another had just tried."""


class Refused:
    """The lines of all namespaces. Knows no queue: it returns whose turn it is."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        """By namespace; none is empty."""

    @property
    def count(self) -> int:
        """How many jobs wait."""
        return sum(len(line.jobs) for line in self._lines.values())

    def crowded(self, namespace: str) -> bool:
        """Whether more than a few jobs wait there."""
        return len(self._line(namespace).jobs) > FEW

    def share(self, namespace: str, workers: int) -> int:
        """How many of the workers a namespace may have at a time: never all, and few where it is crowded."""
        usual = max(1, workers // SHARES)
        return min(usual, WORKERS_IN_A_CROWD) if self.crowded(namespace) else usual

    def again(self, key: Key, generation: int) -> float:
        """The job was refused something. Returns how many seconds it lets pass at least before it tries again."""
        line = self._lines.setdefault(key.namespace, _Line())
        others = len(line.jobs) - (key.uid in line.jobs)
        seconds = SECONDS_BETWEEN_TRIES * others
        line.jobs[key.uid] = _Waiting(key, generation, self._clock() + seconds)
        line.jobs.move_to_end(key.uid)
        return seconds

    def seconds_left(self, key: Key, generation: int) -> float:
        """How long the job, with this spec, lets others go first; 0 where it may try now, until it is refused again."""
        line = self._line(key.namespace)
        waiting = line.jobs.get(key.uid)
        if waiting is None or waiting.generation != generation or waiting.trying:
            return 0.0
        now = self._clock()
        if waiting.until <= now:
            # Half: who comes a little late must not cost the next one its time. A lone job waits for nobody.
            if len(line.jobs) == 1 or now - line.last_try >= SECONDS_BETWEEN_TRIES / 2:
                waiting.trying, line.last_try = True, now
            else:
                waiting.until = line.last_time = max(line.last_time, now) + SECONDS_BETWEEN_TRIES
        return max(0.0, waiting.until - now)

    def served(self, key: Key) -> Sequence[Key]:
        """The job has all it wants. There may be room for more: return the jobs that may try now."""
        return self.freed(key.namespace) if self.forget(key) else ()

    def forget(self, key: Key) -> bool:
        """The job is gone. Returns whether it had been refused something."""
        line = self._line(key.namespace)
        known = line.jobs.pop(key.uid, None) is not None
        if not line.jobs:
            self._lines.pop(key.namespace, None)
        return known

    def freed(self, namespace: str) -> Sequence[Key]:
        """Something that counts against a quota is gone from the namespace: return the few that may try now."""
        line = self._line(namespace)
        first = [line.jobs[uid] for uid in list(line.jobs)[:WOKEN_AT_ONCE]]
        for waiting in first:
            line.jobs.move_to_end(waiting.key.uid)
            waiting.trying = True
        return [waiting.key for waiting in first]

    def forget_all(self) -> None:
        """Forget earlier refusals."""
        self._lines.clear()

    def _line(self, namespace: str) -> _Line:
        return self._lines.get(namespace) or _Line()
