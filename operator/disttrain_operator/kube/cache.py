"""The last seen state of all objects of one kind, in groups (for children: the uid of their job).

Four things flow in: pages of a list (`replace`), events of the list's watch (`apply`, `bookmark`), answers to our own
writes (`observe`), and events of other watches (`observe`, `observe_deleted`). They come in any order, late or twice;
what stands here is always the newest of them. Three rules make that so:

- an object never goes back to an older resourceVersion;
- `progress` is the resourceVersion up to which the list and its watch have told everything. An unknown object that is
  not newer than that has been deleted: a late answer to its POST must not bring it back. Where single namespaces are
  listed and watched, each has a progress of its own, and its list says nothing of the others (`within`);
- a deleted uid stays deleted, whatever other watches still say of it, until a newer list holds it after all.

An object whose group is None is nobody's and is not kept, unless it was somebody's before: then it leaves its group.

An object that cannot be taken in is marked as unreadable. It is not deleted: what was known of it stays, and nobody
should act on that until a newer version could be read (`skip`, `is_unreadable`).

Deleted objects are kept for a while as `gone`: how a pod ended is often known only from its last words. Their number is
bounded, and the namespace that has most of them loses its oldest first.

resourceVersions are compared as numbers, which Kubernetes guarantees since 1.35 and etcd has always made true.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from disttrain_operator.kube.tolerant import Unreadable, identity_of, why_not

Raw = dict[str, Any]

GONE_SECONDS = 120.0
GONE_LIMIT = 20_000


def version_of(raw: Raw) -> int:
    """resourceVersion as a number; 0 where there is none."""
    text = raw["metadata"].get("resourceVersion")
    return int(text) if text else 0


class _Gone(NamedTuple):
    """What is known of a deleted object besides its last state."""

    until: float
    """When it is forgotten."""
    group: str
    version: int
    """The resourceVersion of its deletion."""
    namespace: str


class Cache:
    """Objects by uid and by group. `on_change` is called with the group and the object, after the fact."""

    def __init__(
        self,
        *,
        group_of: Callable[[Raw], str | None],
        trim: Callable[[Raw], Raw] = lambda raw: raw,
        on_change: Callable[[str, Raw], None] = lambda group, raw: None,
        clock: Callable[[], float] = time.monotonic,
        gone_seconds: float = GONE_SECONDS,
        gone_limit: int = GONE_LIMIT,
    ) -> None:
        self._group_of, self._trim, self._clock = group_of, trim, clock
        self.on_change = on_change
        self.on_unreadable: Callable[[Unreadable], None] = lambda found: None
        """Called for each version of an object that cannot be taken in."""
        self._gone_seconds, self._gone_limit = gone_seconds, gone_limit
        self._objects: dict[str, Raw] = {}
        self._groups: dict[str, dict[str, Raw]] = {}
        self._gone: OrderedDict[str, _Gone] = OrderedDict()
        self._gone_in: dict[str, OrderedDict[str, None]] = {}
        """Namespace -> uids of the gone, the oldest first."""
        self._gone_groups: dict[str, dict[str, Raw]] = {}
        self._unreadable: dict[str, Unreadable] = {}
        self._progress: dict[str | None, int] = {}
        """By namespace; None: of all."""
        self._synced = set[str | None]()

    def __len__(self) -> int:
        return len(self._objects)

    def progress(self, within: str | None = None) -> int:
        """Return the resourceVersion up to which all events of this namespace (None: of all) have been received."""
        return self._progress.get(within, 0)

    def synced(self, within: str | None = None) -> bool:
        """Return whether this namespace (None: everything) has been listed."""
        return within in self._synced

    def count(self, within: str | None = None) -> int:
        """Return the number of objects in this namespace (None: of all)."""
        return len(self) if within is None else sum(_is_within(raw, within) for raw in self._objects.values())

    def get(self, uid: str) -> Raw | None:
        """The object with this uid."""
        return self._objects.get(uid)

    def objects(self) -> list[Raw]:
        """Return all objects."""
        return list(self._objects.values())

    def group(self, group: str) -> list[Raw]:
        """The objects of a group."""
        return list(self._groups.get(group, {}).values())

    def gone(self, group: str) -> list[Raw]:
        """The last state of the group's objects that were deleted a short while ago."""
        self._forget_old()
        return list(self._gone_groups.get(group, {}).values())

    def groups(self) -> list[str]:
        """All groups that hold an object."""
        return list(self._groups)

    def unreadable(self) -> Collection[Unreadable]:
        """The objects whose newest version could not be taken in."""
        return self._unreadable.values()

    def find_unreadable(self, uid: str) -> Unreadable | None:
        """The object with this uid, if its newest version could not be taken in."""
        return self._unreadable.get(uid)

    def is_unreadable(self, uid: str) -> bool:
        """Whether what is known of the object, if anything, is not its newest version."""
        return uid in self._unreadable

    def trimmed(self, raw: Raw) -> Raw:
        """What is kept of an object; for callers that hold many before they hand them in. Raises for odd objects."""
        if not isinstance(raw["metadata"]["uid"], str):
            raise TypeError("metadata.uid is no string")
        version_of(raw)
        return self._trim(raw)

    # The list and its watch.

    def replace(
        self,
        objects: Iterable[Raw],
        version: int,
        unreadable: Iterable[Unreadable] = (),
        within: str | None = None,
    ) -> None:
        """A complete list as of `version`. What it lacks has been deleted, unless we learned of it after the list.

        `objects` are trimmed already; `unreadable` are those of the list that could not be. `within`: a list of this
        namespace alone.
        """
        if version < self.progress(within):
            # Lists are consistent reads: only a restored etcd goes back in time, and then nothing known counts.
            self._reset(within)
        self._progress[within] = version
        listed = {raw["metadata"]["uid"]: raw for raw in objects}
        skipped = {found.uid: found for found in unreadable}
        for uid, raw in listed.items():
            if uid in self._gone and self._gone[uid].version < version:
                self._forget_gone(uid)
            try:
                self._put(raw)
            except Exception as error:
                found = identity_of(raw, why_not(error))
                if found is not None:
                    skipped[uid] = found
        there = listed.keys() | skipped.keys()
        vanished = [
            raw
            for uid, raw in self._objects.items()
            if uid not in there and version_of(raw) <= version and _is_within(raw, within)
        ]
        for raw in vanished:
            self._remove(raw, version)
        self._unreadable = {
            uid: known
            for uid, known in self._unreadable.items()
            if uid in there or known.version > version or within not in (None, known.namespace)
        }
        for found in skipped.values():
            self.skip(found)
        self._synced.add(within)

    def apply(self, kind: str, raw: Raw, within: str | None = None) -> None:
        """An event of the list's watch: ADDED, MODIFIED or DELETED."""
        version = version_of(raw)
        self.bookmark(version, within)
        if kind == "DELETED":
            self._remove(self._trim(raw), version)
        elif version > self._known_version(raw):
            self._put(self._trim(raw))

    def bookmark(self, version: int, within: str | None = None) -> None:
        """The watch has told everything up to `version`."""
        self._progress[within] = max(self.progress(within), version)

    def skip(self, found: Unreadable) -> None:
        """This version of an object cannot be taken in."""
        raw, mark = self._objects.get(found.uid), self._unreadable.get(found.uid)
        if found.uid in self._gone or (mark is not None and found.version <= mark.version):
            return
        if raw is not None and found.version < version_of(raw):
            return
        self._unreadable[found.uid] = found
        self.on_unreadable(found)

    def forget(self, found: Unreadable) -> None:
        """This object was deleted; its last state cannot be read."""
        self._unreadable.pop(found.uid, None)
        known = self._objects.get(found.uid)
        if known is not None:
            self._remove(known, found.version)

    # Everybody else.

    def observe(self, raw: Raw) -> None:
        """The answer to an own write or read, or the event of another watch."""
        uid = raw["metadata"]["uid"]
        if uid in self._objects or version_of(raw) > self._progress_at(raw):
            self._put(self._trim(raw))

    def observe_deleted(self, raw: Raw) -> None:
        """Another watch, or a 404, says that this object is gone."""
        self._remove(self._trim(raw), max(version_of(raw), self._progress_at(raw)))

    def _progress_at(self, raw: Raw) -> int:
        """Return the progress of the list that this object belongs to."""
        own = self._progress.get(raw["metadata"].get("namespace"))
        return self.progress() if own is None else own

    def _known_version(self, raw: Raw) -> int:
        known = self._objects.get(raw["metadata"]["uid"])
        return -1 if known is None else version_of(known)

    def _put(self, raw: Raw) -> None:
        uid = raw["metadata"]["uid"]
        if uid in self._gone or self._known_version(raw) >= version_of(raw):
            return
        mark = self._unreadable.get(uid)
        if mark is not None and mark.version < version_of(raw):
            del self._unreadable[uid]
        known = self._objects.get(uid)
        left = None if known is None else self._group_of(known)
        group = self._group_of(raw)
        if known is None and group is None:
            return
        self._objects[uid] = raw
        if group is not None:
            self._groups.setdefault(group, {})[uid] = raw
        if left is not None and left != group:
            _discard(self._groups, left, uid)
            self.on_change(left, raw)
        if group is not None:
            self.on_change(group, raw)

    def _remove(self, raw: Raw, version: int) -> None:
        uid = raw["metadata"]["uid"]
        if uid in self._gone:
            return
        self._unreadable.pop(uid, None)
        known = self._objects.pop(uid, None)
        group = self._group_of(known or raw)
        if known is None and group is None:
            return
        if known is not None and group is not None:
            _discard(self._groups, group, uid)
            # A DELETED event carries the last state, which may be newer than the one we had.
            newer = version_of(raw) >= version_of(known) and self._group_of(raw) == group
            self._gone_groups.setdefault(group, {})[uid] = raw if newer else known
        namespace = raw["metadata"].get("namespace") or ""
        self._gone[uid] = _Gone(self._clock() + self._gone_seconds, group or "", version, namespace)
        self._gone_in.setdefault(namespace, OrderedDict())[uid] = None
        self._forget_old()
        if known is not None and group is not None:
            self.on_change(group, raw)

    def _forget_old(self) -> None:
        now = self._clock()
        while self._gone and next(iter(self._gone.values())).until <= now:
            self._forget_gone(next(iter(self._gone)))
        while len(self._gone) > self._gone_limit:
            most = max(self._gone_in.values(), key=len)
            self._forget_gone(next(iter(most)))

    def _forget_gone(self, uid: str) -> None:
        gone = self._gone.pop(uid)
        _discard(self._gone_groups, gone.group, uid)
        in_namespace = self._gone_in[gone.namespace]
        del in_namespace[uid]
        if not in_namespace:
            del self._gone_in[gone.namespace]

    def _reset(self, within: str | None) -> None:
        for uid in [uid for uid, gone in self._gone.items() if within in (None, gone.namespace)]:
            self._forget_gone(uid)
        for uid in [uid for uid, found in self._unreadable.items() if within in (None, found.namespace)]:
            del self._unreadable[uid]
        for uid, raw in list(self._objects.items()):
            if not _is_within(raw, within):
                continue
            group = self._group_of(raw)
            if group is not None:
                _discard(self._groups, group, uid)
            del self._objects[uid]
            if group is not None:
                self.on_change(group, raw)


def _is_within(raw: Raw, within: str | None) -> bool:
    return within is None or raw["metadata"].get("namespace") == within


def _discard(groups: dict[str, dict[str, Raw]], group: str, uid: str) -> None:
    members = groups.get(group)
    if members is not None:
        members.pop(uid, None)
        if not members:
            del groups[group]
