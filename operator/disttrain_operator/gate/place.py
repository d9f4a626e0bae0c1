"""Which node each pod of a gang goes to: as a whole or not at all, in the order of ranks, groups together.

Groups are placed one after the other, the largest first, each into the topology value that has most room for it, and
within that onto the nodes that have most room: neighbours in rank become neighbours in place. Exact where all pods of
the gang have equal needs and all groups one size (or there is no required topology); otherwise, as this is bin packing,
a gang may be held back that an exhaustive search would place. What is placed always fits.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disttrain_operator.gate.fit import Needs, score
from disttrain_operator.gate.room import Room


@dataclass(frozen=True)
class Member:
    """A pod to place. Members stand in the order of their ranks."""

    uid: str
    needs: Needs
    group: int | None = None
    """Pods of one group belong together in one topology value; None: anywhere."""


@dataclass(frozen=True)
class Together:
    """The node label whose value all pods of a group share."""

    key: str
    required: bool


Placement = dict[str, str]
"""uid -> name of the node."""


def place(
    members: Sequence[Member], room: Room, together: Together | None = None, fixed: Mapping[int, str] | None = None
) -> Placement | None:
    """A node for each member, taken from `room`; None, and `room` as it was, where they do not all fit.

    `fixed`: groups of which a part stands already, and in which topology value.
    """
    if by_counting(members, room, together, fixed) is False:
        return None
    placing = _Placing(room, together, fixed or {})
    placed = False
    try:
        placed = placing.all(members)
    finally:
        if not placed:
            placing.undo()
    return placing.placement if placed else None


def fits(
    members: Sequence[Member], room: Room, together: Together | None = None, fixed: Mapping[int, str] | None = None
) -> bool:
    """Whether `place` would find room. `room` is as it was."""
    counted = by_counting(members, room, together, fixed)
    if counted is not None:
        return counted
    placement = place(members, room, together, fixed)
    if placement is None:
        return False
    for member in members:
        room.give_back(placement[member.uid], member.needs.requests)
    return True


def by_counting(
    members: Sequence[Member], room: Room, together: Together | None = None, fixed: Mapping[int, str] | None = None
) -> bool | None:
    """Whether `place` would find room, as far as that follows from how many pods of each kind there is room for; None
    where it does not.

    For equal pods in groups of one size it always does, as no choice that `place` makes costs others their room.
    """
    kinds = Counter(member.needs for member in members)
    if any(count > room.total(needs) for needs, count in kinds.items()):
        return False
    if len(kinds) > 1 or fixed:
        return None
    if together is None or not together.required or not kinds:
        return True
    groups = Counter(member.group for member in members if member.group is not None)
    sizes = set(groups.values())
    if not sizes:
        return True
    if len(sizes) > 1:
        return None
    (size,) = sizes
    (needs,) = kinds
    return len(groups) <= sum(total // size for total in room.totals(needs, together.key).values())


def _groups(members: Sequence[Member], together: Together | None) -> list[list[Member]]:
    """The largest first, among equals in the order of ranks; those without a group come last."""
    groups: dict[int, list[Member]] = {}
    single: list[Member] = []
    for member in members:
        if together is None or member.group is None:
            single.append(member)
        else:
            groups.setdefault(member.group, []).append(member)
    return [*sorted(groups.values(), key=len, reverse=True), *([single] if single else [])]


class _Placing:
    """A placement that grows."""

    def __init__(self, room: Room, together: Together | None, fixed: Mapping[int, str]) -> None:
        self._room, self._together, self._fixed = room, together, fixed
        self.placement: Placement = {}
        self._taken: list[tuple[str, str, Needs]] = []
        self._later: list[list[Member]] = []
        self._sizes: dict[Needs, object] = {}
        self._domains: dict[str, list[str]] | None = None

    def all(self, members: Sequence[Member]) -> bool:
        """All members; where it is false, some may be placed."""
        groups = _groups(members, self._together)
        return all(self._whole(group) or self._postponed(group) for group in groups) and self._rest()

    def undo(self) -> None:
        """Nobody is placed."""
        self._undo_to(0)

    def _whole(self, members: list[Member]) -> bool:
        """All of a group in one topology value; or anywhere, where there is none."""
        if self._together is None or members[0].group is None:
            self._later.append(members)
            return True
        return any(self._fill(members, nodes) for nodes in self._candidates(members))

    def _postponed(self, members: list[Member]) -> bool:
        """A group that only prefers to be together is spread when all that can be whole are placed."""
        assert self._together is not None
        self._later.append(members)
        return not self._together.required

    def _rest(self) -> bool:
        """Place the pods without a topology group; return whether all fit."""
        return all(self._fill(members, list(self._room.nodes)) for members in self._later)

    def _candidates(self, members: list[Member]) -> list[list[str]]:
        """The nodes of each topology value, the one with most room first: a gang's groups stay near each other."""
        assert self._together is not None
        key, group = self._together.key, members[0].group
        pinned = self._fixed.get(group) if group is not None else None
        if self._domains is None:
            self._domains = {}
            for name, node in self._room.nodes.items():
                value = node.labels.get(key)
                if value is not None:
                    self._domains.setdefault(value, []).append(name)
        totals = self._room.totals(members[0].needs, key)
        started = {self._room.nodes[node].labels.get(key) for node in set(self.placement.values())}
        values = [value for value in self._domains if pinned in (None, value)]
        values.sort(key=lambda value: (value not in started, -totals.get(value, 0), value))
        return [self._domains[value] for value in values]

    def _fill(self, members: list[Member], nodes: list[str]) -> bool:
        """Each member onto a node of these; none of them, where one finds no room."""
        mark = len(self._taken)
        order: dict[Needs, list[str]] = {}
        # The largest request finds the least room, so it comes first. Equal requests keep the order of ranks.
        for member in sorted(members, key=lambda member: self._size(member.needs), reverse=True):
            if member.needs not in order:
                order[member.needs] = self._ordered(member.needs, nodes)
            candidates = order[member.needs]
            while candidates and not self._room.has_room(member.needs, candidates[-1]):
                candidates.pop()
            if not candidates:
                self._undo_to(mark)
                return False
            self._take(member, candidates[-1])
        return True

    def _ordered(self, needs: Needs, nodes: list[str]) -> list[str]:
        """The best last: liked nodes, then those with most room, in the order of their topology."""
        key = self._together.key if self._together is not None else ""
        counts = self._room.capacities(needs)

        def place_of(name: str) -> tuple[int, int, str, str]:
            node = self._room.nodes[name]
            return (-score(needs, node), -counts[name], node.labels.get(key, ""), name)

        return sorted((name for name in nodes if name in counts), key=place_of, reverse=True)

    def _size(self, needs: Needs) -> Any:
        """Return the sort key of the pod."""
        if needs not in self._sizes:
            self._sizes[needs] = _size(needs)
        return self._sizes[needs]

    def _take(self, member: Member, node: str) -> None:
        self._room.take(node, member.needs.requests)
        self._taken.append((member.uid, node, member.needs))
        self.placement[member.uid] = node

    def _undo_to(self, mark: int) -> None:
        while len(self._taken) > mark:
            uid, node, needs = self._taken.pop()
            self._room.give_back(node, needs.requests)
            del self.placement[uid]


def _size(needs: Needs) -> tuple[tuple[int, ...], ...]:
    """Extended resources count most, then memory, then cpu."""
    wanted = dict(needs.requests)
    rare = sorted((value for name, value in wanted.items() if "/" in name), reverse=True)
    return (tuple(rare), (wanted.get("memory", 0), wanted.get("cpu", 0)))
