"""Lines of things that wait, one line per group: the groups take turns, and within a line the first comes first.

However long one line is, a thing in another waits for one turn of each group at most. Every operation takes the same
short time.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """With a `limit`, at most so many things of one group are out at a time: from `pop` until `done`.

    What it says of a group may change; a group that has more out by then gives no more than one until it has less.
    """

    def __init__(self, limit: Callable[[str], int] | None = None) -> None:
        self._limit = limit
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()
        """By group, the next to be served first. None is empty."""
        self._paused: dict[str, deque[Item]] = {}
        """Lines of groups that have as many out as they may."""
        self._out: Counter[str] = Counter()
        self._length = 0

    def __len__(self) -> int:
        """All that wait, also those whose group has as many out as it may."""
        return self._length

    def __iter__(self) -> Iterator[Item]:
        """All that wait, group by group."""
        return chain.from_iterable([*self._lines.values(), *self._paused.values()])

    @property
    def ready(self) -> bool:
        """Whether `pop` has something to give."""
        return bool(self._lines)

    def push(self, group: str, item: Item) -> None:
        """Put an item at the end of its group's line."""
        lines = self._paused if self._is_full(group) else self._lines
        lines.setdefault(group, deque()).append(item)
        self._length += 1

    def pop(self) -> Item:
        """Take the first of the group whose turn it is. Raises StopIteration where nothing is ready."""
        group = next(iter(self._lines))
        line = self._lines.pop(group)
        item = line.popleft()
        self._length -= 1
        if self._limit is not None:
            self._out[group] += 1
        if line:
            (self._paused if self._is_full(group) else self._lines)[group] = line
        return item

    def done(self, group: str) -> None:
        """One of the group's things is no longer out."""
        if self._limit is None:
            return
        self._out[group] -= 1
        if not self._out[group]:
            del self._out[group]
        line = self._paused.pop(group, None)
        if line is not None:
            (self._paused if self._is_full(group) else self._lines)[group] = line

    def _is_full(self, group: str) -> bool:
        return self._limit is not None and self._out[group] >= self._limit(group)
