"""Jobs that were refused a child, by namespace: who tries again, when, and how many of them at a time.

Where a quota is full there may be thousands. Each tries again after its own back-off, but the more wait in a namespace
the longer they wait, so that all of them together ask for little. A pod that goes wakes the few whose last try is the
longest ago; each of them that then has all it wants wakes the next few. So what is asked follows from what became free,
not from how many wait, and everybody's turn comes.
"""

from collections import OrderedDict
from collections.abc import Callable

from disttrain_operator.snapshot import Key

WOKEN_AT_ONCE = 2
SECONDS_BETWEEN_TRIES = 0.1
# A job is looked at this often whatever happens (reconcile.py).
MAX_SECONDS = 300.0


class Refused:
    """`wake` has a job looked at now."""

    def __init__(self, wake: Callable[[Key], None]) -> None:
        self._wake = wake
        self._lines: dict[str, OrderedDict[str, Key]] = {}
        """Namespace -> uid -> key; the one whose last try is the longest ago first."""

    def __len__(self) -> int:
        """How many jobs wait."""
        return sum(len(line) for line in self._lines.values())

    def again(self, key: Key) -> float:
        """The job was refused something. Returns how many seconds it lets pass before it tries again."""
        line = self._lines.setdefault(key.namespace, OrderedDict())
        line[key.uid] = key
        line.move_to_end(key.uid)
        return min(SECONDS_BETWEEN_TRIES * len(line), MAX_SECONDS)

    def served(self, key: Key) -> None:
        """The job has all it wants. There may be room for more."""
        if self.forget(key):
            self.freed(key.namespace)

    def forget(self, key: Key) -> bool:
        """The job is gone. Returns whether it had been refused something."""
        line = self._lines.get(key.namespace, OrderedDict())
        known = line.pop(key.uid, None) is not None
        if not line:
            self._lines.pop(key.namespace, None)
        return known

    def freed(self, namespace: str) -> None:
        """Something that counts against a quota is gone from the namespace: what a few may have been waiting for."""
        line = self._lines.get(namespace, OrderedDict())
        for _ in range(min(WOKEN_AT_ONCE, len(line))):
            uid, key = next(iter(line.items()))
            line.move_to_end(uid)
            self._wake(key)

    def forget_all(self) -> None:
        """What was refused before is of another time."""
        self._lines.clear()
