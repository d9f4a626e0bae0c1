"""The last seen state of all objects of one kind, in groups (for children: the uid of their job).

Four things flow in: pages of a list (`replace`), events of the list's watch (`apply`, `bookmark`), answers to our own
writes (`observe`), and events of other watches (`observe`, `observe_deleted`). They come in any order, late or twice;
what stands here is always the newest of them. Three rules make that so:

- an object never goes back to an older resourceVersion;
- `progress` is the resourceVersion up to which list and watch have delivered everything. An unknown object that is
  not newer than that has been deleted: a late answer to its POST must not bring it back. Where single namespaces are
  listed and watched, each has a progress of its own, and its list says nothing of the others (`within`);
- a deleted uid stays deleted, whatever other watches still say of it, until a newer list holds it after all.

An object whose group is None is nobody's and is not kept, unless it was somebody's before: then it leaves its group.

An object that cannot be taken in is marked as unreadable. It is not deleted: what was known of it stays, and nobody
should act on that until a newer version could be read (`skip`, `is_unreadable`). So it is with one for which there is
no room in the budget (budget.py), or that has to give way: its name is kept, and whose it is (`is_partial`). It is
taken in by its next event, by the next list, or when again.py finds that there is room.

Deleted objects are kept for a while as `gone` (gone.py).

resourceVersions are compared as numbers, which Kubernetes guarantees since 1.35 and etcd has always made true.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from disttrain_operator.kube.budget import UNBOUNDED, Budget, weight
from disttrain_operator.kube.gone import Gone
from disttrain_operator.kube.marks import Marks, no_room
from disttrain_operator.kube.sizes import TooMuch
from disttrain_operator.kube.tolerant import Unreadable, refused

Raw = dict[str, Any]

GONE_SECONDS = 120.0
GONE_LIMIT = 20_000


def version_of(raw: Raw) -> int:
    """resourceVersion as a number; 0 where there is none."""
    text = raw["metadata"].get("resourceVersion")
    return int(text) if text else 0


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
        budget: Budget | None = None,
    ) -> None:
        """Without a budget of all caches this one is not bounded."""
        self._group_of, self._trim = group_of, trim
        self.on_change = on_change
        self.on_unreadable: Callable[[Unreadable], None] = lambda found: None
        """Called for each version of an object that cannot be taken in."""
        self._account = (budget or Budget(UNBOUNDED, UNBOUNDED)).open(self)
        self._objects: dict[str, Raw] = {}
        self._groups: dict[str, dict[str, Raw]] = {}
        self._gone = Gone(self._account, clock, gone_seconds, gone_limit)
        self._marks = Marks()
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
        return self._gone.group(group)

    def groups(self) -> list[str]:
        """All groups that hold an object."""
        return list(self._groups)

    def unreadable(self) -> Collection[Unreadable]:
        """The objects whose newest version could not be taken in."""
        return self._marks.all()

    def find_unreadable(self, uid: str) -> Unreadable | None:
        """The object with this uid, if its newest version could not be taken in."""
        return self._marks.get(uid)

    def is_unreadable(self, uid: str) -> bool:
        """Return whether the known version of the object, if any, is not its newest."""
        return self._marks.get(uid) is not None

    def is_partial(self, group: str, namespace: str) -> bool:
        """Whether something of this group may be left out for want of room."""
        return self._marks.is_partial(group, namespace)

    def with_room(self) -> set[str]:
        """Return the namespaces of which something was left out for want of room, and could be taken in now."""
        self._gone.forget_old()
        return self._marks.with_room(self._account.budget)

    def trimmed(self, raw: Raw) -> Raw:
        """Return the cache entry of an object, for callers that collect many before they add them. Raises for odd
        objects.

        It may be called in a thread.
        """
        uid = raw["metadata"]["uid"]
        if not isinstance(uid, str):
            raise TypeError("metadata.uid is no string")
        known, version = self._objects.get(uid), version_of(raw)
        return known if known is not None and version_of(known) == version else self._trim(raw)

    def unread(self, raw: Raw, error: Exception) -> Unreadable | None:
        """Return the object as one that this error kept from being taken in; None where it does not say which it is."""
        found = refused(raw, error)
        return replace(found, group=self._group_of(raw)) if found and isinstance(error, TooMuch) else found

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
        listing = self.listing(version, within)
        listing.take(objects, unreadable)
        listing.end()

    def listing(self, version: int, within: str | None = None) -> "Listing":
        """A complete list as of `version`, which comes in parts. What it lacks is deleted at its end."""
        if version < self.progress(within):
            # Lists are consistent reads: only a restored etcd goes back in time, and then nothing known counts.
            self._reset(within)
            self._progress[within] = 0
        return Listing(self, version, within)

    def apply(self, kind: str, raw: Raw, within: str | None = None) -> None:
        """An event of the list's watch: ADDED, MODIFIED or DELETED."""
        version = version_of(raw)
        self.bookmark(version, within)
        if kind == "DELETED":
            self._remove(self._trimmed_or_known(raw), version)
        elif version > self._known_version(raw):
            self._put(self._trim(raw))

    def bookmark(self, version: int, within: str | None = None) -> None:
        """The watch has delivered everything up to `version`."""
        self._progress[within] = max(self.progress(within), version)

    def skip(self, found: Unreadable) -> None:
        """This version of an object cannot be taken in."""
        raw, mark = self._objects.get(found.uid), self._marks.get(found.uid)
        if found.uid in self._gone or (mark is not None and found.version <= mark.version):
            return
        if raw is not None and found.version < version_of(raw):
            return
        self._mark(found)

    def forget(self, found: Unreadable) -> None:
        """This object was deleted; its last state cannot be read."""
        self._marks.remove(found.uid)
        known = self._objects.get(found.uid)
        if known is not None:
            self._remove(known, found.version)

    # The budget.

    def forget_oldest_gone(self, namespace: str) -> bool:
        """Forget the oldest of the namespace's deleted objects. Returns whether there was one."""
        return self._gone.forget_oldest(namespace)

    def give_up(self, uid: str) -> None:
        """Keep the name of this object alone: others need the room."""
        raw = self._objects[uid]
        group = self._group_of(raw)
        size = self._account.size(_namespace(raw), uid)
        self._leave(raw)
        self._mark(no_room(raw, size, group))
        if group is not None:
            self.on_change(group, raw)

    # Everybody else.

    def observe(self, raw: Raw) -> None:
        """The answer to an own write or read, or the event of another watch."""
        uid = raw["metadata"]["uid"]
        if uid in self._objects or self._marks.get(uid) is not None or version_of(raw) > self._progress_at(raw):
            try:
                self._put(self._trim(raw))
            except TooMuch as error:
                found = self.unread(raw, error)
                if found is not None:
                    self.skip(found)

    def observe_deleted(self, raw: Raw) -> None:
        """Another watch, or a 404, says that this object is gone."""
        self._remove(self._trimmed_or_known(raw), max(version_of(raw), self._progress_at(raw)))

    def _progress_at(self, raw: Raw) -> int:
        """Return the progress of the list that this object belongs to."""
        own = self._progress.get(raw["metadata"].get("namespace"))
        return self.progress() if own is None else own

    def _known_version(self, raw: Raw) -> int:
        known = self._objects.get(raw["metadata"]["uid"])
        return -1 if known is None else version_of(known)

    def _trimmed_or_known(self, raw: Raw) -> Raw:
        """A deleted object; where its last state would be too large, what is known of it."""
        try:
            return self._trim(raw)
        except TooMuch:
            # If it was not known either, only its deletion is passed on.
            return self._objects.get(raw["metadata"]["uid"], raw)

    def _put(self, raw: Raw) -> None:
        uid = raw["metadata"]["uid"]
        if uid in self._gone or self._known_version(raw) >= version_of(raw):
            return
        known = self._objects.get(uid)
        left = None if known is None else self._group_of(known)
        group = self._group_of(raw)
        if known is None and group is None:
            return
        namespace, size = _namespace(raw), weight(raw)
        if not self._account.make_room(namespace, uid, size):
            self.skip(no_room(raw, size, group))
            return
        mark = self._marks.get(uid)
        if mark is not None and mark.version <= version_of(raw):
            self._marks.remove(uid)
        self._account.put(namespace, uid, size)
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
        self._marks.remove(uid)
        known = self._objects.get(uid)
        group = self._group_of(known or raw)
        if known is None and group is None:
            return
        last = None
        if known is not None:
            self._leave(known)
            # A DELETED event carries the last state, which may be newer than the one we had.
            newer = version_of(raw) >= version_of(known) and self._group_of(raw) == group
            last = raw if newer else known
        self._gone.add(uid, _namespace(raw), group, version, last)
        if known is not None and group is not None:
            self.on_change(group, raw)

    def _leave(self, raw: Raw) -> None:
        """This object is no longer among those that are kept."""
        uid, group = raw["metadata"]["uid"], self._group_of(raw)
        del self._objects[uid]
        if group is not None:
            _discard(self._groups, group, uid)
        self._account.put(_namespace(raw), uid, 0)

    def _mark(self, found: Unreadable) -> None:
        self._marks.add(found, known=found.uid in self._objects)
        self.on_unreadable(found)

    def _reset(self, within: str | None) -> None:
        self._gone.forget_all(within)
        for found in [found for found in self._marks.all() if within in (None, found.namespace)]:
            self._marks.remove(found.uid)
        for raw in [raw for raw in self._objects.values() if _is_within(raw, within)]:
            group = self._group_of(raw)
            self._leave(raw)
            if group is not None:
                self.on_change(group, raw)

    # The parts of a list.

    def take_listed(self, raw: Raw, version: int, within: str | None) -> None:
        """An object of a list as of `version`."""
        uid = raw["metadata"]["uid"]
        if self.progress(within) > version and uid not in self._objects and self._marks.get(uid) is None:
            return  # it was deleted after that, by an event of the watch
        if uid in self._gone and self._gone.version(uid) < version:
            self._gone.forget(uid)
        try:
            self._put(raw)
        except Exception as error:
            found = self.unread(raw, error)
            if found is not None:
                self.skip(found)

    def end_list(self, there: Collection[str], version: int, within: str | None, since: int) -> None:
        """All objects of a list as of `version` were taken; there are no others than these."""
        self.bookmark(version, within)
        vanished = [
            raw
            for uid, raw in self._objects.items()
            if uid not in there and version_of(raw) <= version and _is_within(raw, within)
        ]
        for raw in vanished:
            self._remove(raw, version)
        for found in list(self._marks.all()):
            if found.uid not in there and found.version <= version and within in (None, found.namespace):
                self._marks.remove(found.uid)
        self._marks.end_list(within, since)
        self._synced.add(within)

    def marks_so_far(self) -> int:
        """Return a number that grows, for `end_list` and `end_again`."""
        return self._marks.count

    def end_again(self, namespace: str, since: int) -> None:
        """All that there is of this namespace was observed: what was not marked since then is not missing."""
        self._marks.end_list(namespace, since)


class Listing:
    """A list that comes in parts."""

    def __init__(self, cache: Cache, version: int, within: str | None) -> None:
        self._cache, self._version, self._within = cache, version, within
        self._there, self._since = set[str](), cache.marks_so_far()

    def take(self, objects: Iterable[Raw], unreadable: Iterable[Unreadable] = ()) -> None:
        """A part of the list: objects that are trimmed already, and those that could not be."""
        for raw in objects:
            self.saw(raw["metadata"]["uid"])
            self._cache.take_listed(raw, self._version, self._within)
        for found in unreadable:
            self.saw(found.uid)
            self._cache.skip(found)

    def saw(self, uid: str) -> None:
        """The list has an object with this uid."""
        self._there.add(uid)

    def end(self) -> None:
        """The list is complete."""
        self._cache.end_list(self._there, self._version, self._within, self._since)


def _is_within(raw: Raw, within: str | None) -> bool:
    return within is None or raw["metadata"].get("namespace") == within


def _namespace(raw: Raw) -> str:
    return raw["metadata"].get("namespace") or ""


def _discard(groups: dict[str, dict[str, Raw]], group: str, uid: str) -> None:
    members = groups.get(group)
    if members is not None:
        members.pop(uid, None)
        if not members:
            del groups[group]
