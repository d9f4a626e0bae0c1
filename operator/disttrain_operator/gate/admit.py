"""Admission: all waiting gangs and all nodes -> the gangs to release, their nodes, and why the others must wait.

Order: what is partly released already, then priority, then age. A gang that waits for room which others will free keeps
its place: a later one passes it only on nodes that the earlier one could not use. So a large gang is not starved by
small ones that come after it; the price is that room which it waits for stays empty meanwhile. reservation.py bounds
for how long. A gang that would not fit even if all other jobs ended holds nobody up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from disttrain_operator.gate.fit import Needs, NodeFacts
from disttrain_operator.gate.place import Member, Placement, Together, fits, place
from disttrain_operator.gate.room import Room, Used
from disttrain_operator.gate.why import why_not

BEHIND = "waits behind gangs that came first and need the same nodes"
UNPLACEABLE = "the gate has failed to look for room for it"


@dataclass(frozen=True)
class WaitingGang:
    """A gang of which all pods exist and at least one is gated."""

    uid: str
    """The uid of its job."""
    members: tuple[Member, ...]
    """Pods that are still gated, in the order of their ranks."""
    created: str
    """Since when it is in line: the job's creationTimestamp, unless it lost its place."""
    priority: int = 0
    together: Together | None = None
    standing: Mapping[str, str] = field(default_factory=dict)
    """Pods that have been let go before -> their nodes."""
    groups: Mapping[str, int | None] = field(default_factory=dict)
    """Groups of the pods that stand."""
    waiting_since: datetime | None = None
    """When its attempt began."""


@dataclass(frozen=True)
class Outcome:
    """Result for a waiting gang: a node for each member, or the reason why not."""

    placement: Placement | None
    why: str = ""
    waits_for_others: bool = False
    """It would fit if other jobs ended."""
    failed: bool = False
    """Looking at it has failed."""


def admit(
    gangs: Iterable[WaitingGang], nodes: Sequence[NodeFacts], used: Used, lasting: Used, *, keep: bool = True
) -> dict[str, Outcome]:
    """By the job's uid. `used`: what existing pods and earlier admissions take; `lasting`: what of it no job's end will
    free; `keep`: whether gangs that wait for what others will free keep the nodes that they could use."""
    room = Room(nodes, used)
    admitting = _Admitting(room, Room(nodes, lasting, like=room), keep)
    outcomes = {}
    for gang in sorted(gangs, key=order):
        try:
            outcomes[gang.uid] = admitting.outcome(gang)
        except Exception as error:
            # Whatever it is about this gang, it is no other's trouble.
            outcomes[gang.uid] = Outcome(
                None, f"{UNPLACEABLE} ({type(error).__name__}: {str(error)[:200]})", failed=True
            )
    return outcomes


class _Admitting:
    """One gang after the other, each into what the ones before it have left."""

    def __init__(self, room: Room, empty: Room, keep: bool) -> None:
        self._room, self._empty, self._keep = room, empty, keep
        self._passable = room
        """Without the nodes that are kept for gangs that came first."""
        self._refused: dict[object, Outcome] = {}

    def outcome(self, gang: WaitingGang) -> Outcome:
        # Room only shrinks during one cycle: after a refusal the same request is refused again.
        shape = None if gang.standing else (_shape(gang), gang.together)
        if shape in self._refused:
            return self._refused[shape]
        placement = place(gang.members, self._passable, gang.together, _values(gang, self._room))
        if placement is not None:
            if self._passable is not self._room:
                _take(self._room, gang, placement)
            return Outcome(placement)
        refused = self._refusal(gang)
        if shape is not None:
            self._refused[shape] = refused
        return refused

    def _refusal(self, gang: WaitingGang) -> Outcome:
        behind = self._passable is not self._room and _fits(gang, self._room)
        why = BEHIND if behind else why_not(gang.members, gang.together, self._room)
        awaited = _awaited(gang, self._empty)
        if self._keep and not awaited.isdisjoint(self._passable.nodes):
            if self._passable is self._room:
                self._passable = self._room.copy()
            self._passable.remove(awaited)
        return Outcome(None, why, waits_for_others=bool(awaited))


def order(gang: WaitingGang) -> tuple[bool, int, str, str]:
    """Return what gangs are sorted by: the first goes first."""
    return (not gang.standing, -gang.priority, gang.created, gang.uid)


def _values(gang: WaitingGang, room: Room) -> dict[int, str]:
    """The topology value of each group of which a part stands."""
    values: dict[int, str] = {}
    for uid, name in gang.standing.items():
        group, node = gang.groups.get(uid), room.nodes.get(name)
        if group is not None and gang.together is not None and gang.together.required and node is not None:
            values.setdefault(group, node.labels.get(gang.together.key, ""))
    return values


def _shape(gang: WaitingGang) -> tuple[tuple[Needs, int | None], ...]:
    return tuple((member.needs, member.group) for member in gang.members)


def _take(room: Room, gang: WaitingGang, placement: Placement) -> None:
    for member in gang.members:
        room.take(placement[member.uid], member.needs.requests)


def _fits(gang: WaitingGang, room: Room) -> bool:
    return fits(gang.members, room, gang.together, _values(gang, room))


def _awaited(gang: WaitingGang, empty: Room) -> set[str]:
    """The nodes that the gang could use, if other jobs' ends gave it room; none where that would not help."""
    if not _fits(gang, empty):
        return set()
    kinds = {member.needs for member in gang.members}
    unusable = [empty.unfit(needs).keys() for needs in kinds]
    return {name for name in empty.nodes if not all(name in names for names in unusable)}
