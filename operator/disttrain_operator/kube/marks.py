"""The objects of which the name alone is known: what could not be read, and what there was no room for.

Their number is bounded, too. Beyond the bound an object is not named, and its namespace counts as one of which nobody
knows what is missing, until a list has shown that nothing is.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

from disttrain_operator.kube.budget import Budget
from disttrain_operator.kube.tolerant import Unreadable

MOST_OF_ONE = 5_000
"""A namespace has no more. Each is about half a kilobyte."""
MOST = 20_000
WHAT_TO_DO = (
    "Delete jobs, pods or Services of this namespace that are no longer needed, or ask for fewer and smaller ones; the"
    " operator takes it in when there is room"
)
_NO_ROOM = "the operator keeps no more of the objects of its namespace: they take as many bytes as one may have"


class Marks:
    """By uid. What is kept in an older version is always marked."""

    def __init__(self, most: int = MOST, most_of_one: int = MOST_OF_ONE) -> None:
        self._most, self._most_of_one = most, most_of_one
        self._marks: dict[str, Unreadable] = {}
        self._in: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._unnamed: dict[str, tuple[int, int]] = {}
        """Namespaces that miss objects without a mark: `count` at the last of them, and the least that one needs."""
        self.count = 0
        """How many were marked, or were too many to be, so far."""

    def all(self) -> Collection[Unreadable]:
        """Return all that are marked."""
        return self._marks.values()

    def get(self, uid: str) -> Unreadable | None:
        """Return what is known of this object; None where it is not marked."""
        return self._marks.get(uid)

    def add(self, found: Unreadable, *, known: bool) -> None:
        """Mark an object. `known`: an older version of it is kept."""
        self.count += 1
        self.remove(found.uid)
        if not known and (len(self._marks) >= self._most or self._in[found.namespace] >= self._most_of_one):
            _, least = self._unnamed.get(found.namespace, (0, found.needs))
            self._unnamed[found.namespace] = self.count, min(least, found.needs)
            return
        self._marks[found.uid] = found
        self._in[found.namespace] += 1
        if found.group is not None:
            self._groups[found.group] += 1

    def remove(self, uid: str) -> None:
        """It could be read, or is gone."""
        found = self._marks.pop(uid, None)
        if found is None:
            return
        _less(self._in, found.namespace)
        if found.group is not None:
            _less(self._groups, found.group)

    def is_partial(self, group: str, namespace: str) -> bool:
        """Whether something of this group may be missing."""
        return group in self._groups or namespace in self._unnamed

    def with_room(self, budget: Budget) -> set[str]:
        """Return the namespaces of which something was left out for want of room that there is now."""
        found = set[str]()
        for namespace, (_, least) in self._unnamed.items():
            if least and budget.fits(namespace, least):
                found.add(namespace)
        for mark in self._marks.values():
            if mark.needs and mark.namespace not in found and budget.fits(mark.namespace, mark.needs):
                found.add(mark.namespace)
        return found

    def end_list(self, within: str | None, since: int) -> None:
        """A list of this namespace (None: of all) has ended that began when `count` was `since`."""
        for namespace in [key for key, (count, _) in self._unnamed.items() if count <= since and within in (None, key)]:
            del self._unnamed[namespace]


def no_room(raw: dict[str, Any], needs: int, group: str | None) -> Unreadable:
    """Return an object for which there is no room."""
    metadata = raw["metadata"]
    version = int(metadata.get("resourceVersion") or 0)
    namespace = metadata.get("namespace") or ""
    return Unreadable(namespace, metadata["name"], metadata["uid"], version, _NO_ROOM, WHAT_TO_DO, needs, group)


def _less(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
