"""Who is next: all waiting gangs and all nodes -> who may go, to which nodes, and why the others may not.

Order: what is partly released already, then priority, then age. A gang that waits for room which others will free keeps
its place: a later one passes it only on nodes that the earlier one could not use. So a large gang is not starved by
small ones that come after it; the price is that room which it waits for stays empty meanwhile. hold.py bounds for how
long. A gang that would not fit even if all other jobs ended holds nobody up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from disttrain_operator.gate.fit import Needs, NodeFacts
from disttrain_operator.gate.place import Member, Placement, Together, fits, place
from disttrain_operator.gate.room import Room, Used
from disttrain_operator.gate.why import why_not

BEHIND = "waits behind gangs that came first and need the same nodes"


@dataclass(frozen=True)
class WaitingGang:
    """A gang of which all pods exist and at least one is held by the gate."""

    uid: str
    """Of its job."""
    members: tuple[Member, ...]
    """Pods that are still held, in the order of their ranks."""
    created: str
    """The job's creationTimestamp."""
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
    """What becomes of a waiting gang now: a node for each member, or why not."""

    placement: Placement | None
    why: str = ""
    waits_for_others: bool = False
    """It would fit if other jobs ended."""


def admit(
    gangs: Iterable[WaitingGang], nodes: Sequence[NodeFacts], used: Used, lasting: Used, *, keep: bool = True
) -> dict[str, Outcome]:
    """By the job's uid. `used`: what existing pods and earlier admissions take; `lasting`: what of it no job's end will
    free; `keep`: whether gangs that wait for what others will free keep the nodes that they could use."""
    outcomes: dict[str, Outcome] = {}
    room = Room(nodes, used)
    empty = Room(nodes, lasting, like=room)
    passable = room
    """Without the nodes that are kept for gangs that came first."""
    refused: dict[object, Outcome] = {}
    for gang in sorted(gangs, key=_turn):
        # Room only shrinks while we look: whoever asks for the same after a refusal is refused, too.
        shape = None if gang.standing else (_shape(gang), gang.together)
        if shape in refused:
            outcomes[gang.uid] = refused[shape]
            continue
        placement = place(gang.members, passable, gang.together, _values(gang, room))
        if placement is not None:
            outcomes[gang.uid] = Outcome(placement)
            if passable is not room:
                _take(room, gang, placement)
            continue
        behind = passable is not room and _fits(gang, room)
        why = BEHIND if behind else why_not(gang.members, gang.together, room)
        awaited = _awaited(gang, empty)
        outcome = outcomes[gang.uid] = Outcome(None, why, waits_for_others=bool(awaited))
        if shape is not None:
            refused[shape] = outcome
        if keep and not awaited.isdisjoint(passable.nodes):
            passable = room.copy() if passable is room else passable
            passable.remove(awaited)
    return outcomes


def _turn(gang: WaitingGang) -> tuple[bool, int, str, str]:
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
