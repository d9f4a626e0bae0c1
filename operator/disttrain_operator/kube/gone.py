"""Deleted objects, kept for a while: the end of a pod is often known only from its termination message.

Their number is bounded, and the namespace that has most of them loses its oldest first. Their bytes count with those of
the objects that exist, and are the first to go.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

from disttrain_operator.kube.budget import ENTRY_BYTES, Account, weight

Raw = dict[str, Any]


class _Entry(NamedTuple):
    """Facts of a deleted object besides its last state."""

    until: float
    """When it is forgotten."""
    group: str
    version: int
    """The resourceVersion of its deletion."""
    namespace: str


class Gone:
    """Deleted objects by uid, and their last states by group."""

    def __init__(self, account: Account, clock: Callable[[], float], seconds: float, limit: int) -> None:
        self._account, self._clock, self._seconds, self._limit = account, clock, seconds, limit
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._in: dict[str, OrderedDict[str, None]] = {}
        """Namespace -> uids, the oldest first."""
        self._groups: dict[str, dict[str, Raw]] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._entries

    def version(self, uid: str) -> int:
        """Return the resourceVersion of the deletion; -1 where nothing is known of it."""
        entry = self._entries.get(uid)
        return -1 if entry is None else entry.version

    def group(self, group: str) -> list[Raw]:
        """Return the last states of the group's objects."""
        self.forget_old()
        return list(self._groups.get(group, {}).values())

    def add(self, uid: str, namespace: str, group: str | None, version: int, last: Raw | None) -> None:
        """An object was deleted; `last` is its last state, where that is known and somebody's."""
        size = ENTRY_BYTES
        if not self._account.make_room(namespace, uid, size):
            return
        if last is not None and group is not None:
            whole = weight(last)
            if self._account.make_room(namespace, uid, whole):
                self._groups.setdefault(group, {})[uid] = last
                size = whole
        self._account.put(namespace, uid, size)
        self._entries[uid] = _Entry(self._clock() + self._seconds, group or "", version, namespace)
        self._in.setdefault(namespace, OrderedDict())[uid] = None
        self.forget_old()

    def forget(self, uid: str) -> None:
        """It was not deleted, or that is of no use any more."""
        entry = self._entries.pop(uid)
        members = self._groups.get(entry.group, {})
        members.pop(uid, None)
        if not members:
            self._groups.pop(entry.group, None)
        in_namespace = self._in[entry.namespace]
        del in_namespace[uid]
        if not in_namespace:
            del self._in[entry.namespace]
        self._account.put(entry.namespace, uid, 0)

    def forget_old(self) -> None:
        """Forget what was deleted long ago, and what is too much."""
        now = self._clock()
        while self._entries and next(iter(self._entries.values())).until <= now:
            self.forget(next(iter(self._entries)))
        while len(self._entries) > self._limit:
            most = max(self._in.values(), key=len)
            self.forget(next(iter(most)))

    def forget_oldest(self, namespace: str) -> bool:
        """Forget the oldest of this namespace. Returns whether there was one."""
        oldest = next(iter(self._in.get(namespace, ())), None)
        if oldest is not None:
            self.forget(oldest)
        return oldest is not None

    def forget_all(self, namespace: str | None) -> None:
        """Forget all of this namespace; None: of all."""
        for uid in [uid for uid, entry in self._entries.items() if namespace in (None, entry.namespace)]:
            self.forget(uid)
