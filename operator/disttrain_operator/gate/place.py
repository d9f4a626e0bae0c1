"""Which node each pod of a gang goes to: as a whole or not at all, in the order of ranks, groups together.

Groups are placed one after the other, the largest first, each into the topology value that has most room for it, and
within that onto the nodes that have most room: neighbours in rank become neighbours in place. Exact where all pods of
the gang have equal needs and all groups one size (or there is no required topology); otherwise, as this is bin packing,
a gang may be held back that an exhaustive search would place. What is placed always fits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from disttrain_operator.gate.fit import Needs, NodeFacts, capacity, score, unfit


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


Used = Mapping[str, Mapping[str, int]]
"""Name of a node -> resource -> what is taken of it."""


class Room:
    """Nodes with what is free on them."""

    def __init__(self, nodes: Iterable[NodeFacts], used: Used | None = None, like: "Room | None" = None) -> None:
        """`used`: what is taken, by the node's name. `like`: a room of the same nodes, whose findings are shared."""
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.free = {name: dict(node.allocatable) for name, node in self.nodes.items()}
        self._like = like
        self._unfit: dict[Needs, dict[str, str]] = {}
        for name, amounts in (used or {}).items():
            self.take(name, amounts.items())

    def take(self, node: str, requests: Iterable[tuple[str, int]]) -> None:
        """Less is free on the node, which need not exist."""
        free = self.free.get(node)
        if free is not None:
            for resource, value in requests:
                free[resource] = free.get(resource, 0) - value

    def give_back(self, node: str, requests: Iterable[tuple[str, int]]) -> None:
        """The opposite of `take`."""
        self.take(node, ((resource, -value) for resource, value in requests))

    def unfit(self, needs: Needs) -> Mapping[str, str]:
        """The nodes where such a pod may not run however empty they are, and why. Asked often, found out once."""
        if self._like is not None:
            return self._like.unfit(needs)
        if needs not in self._unfit:
            causes = ((name, unfit(needs, node)) for name, node in self.nodes.items())
            self._unfit[needs] = {name: cause for name, cause in causes if cause is not None}
        return self._unfit[needs]

    def capacities(self, needs: Needs, names: Iterable[str] | None = None) -> dict[str, int]:
        """How many such pods each node can take now; only nodes that can take any."""
        unfit_ = self.unfit(needs)
        counts = (
            (name, capacity(needs, self.free[name]))
            for name in (self.nodes if names is None else names)
            if name not in unfit_
        )
        return {name: count for name, count in counts if count}

    def has_room(self, needs: Needs, node: str) -> bool:
        """Whether the node, where such a pod may run, can take one now."""
        return capacity(needs, self.free[node]) > 0


Placement = dict[str, str]
"""uid -> name of the node."""


def place(
    members: Sequence[Member], room: Room, together: Together | None = None, fixed: Mapping[int, str] | None = None
) -> Placement | None:
    """A node for each member, taken from `room`; None, and `room` as it was, where they do not all fit.

    `fixed`: groups of which a part stands already, and in which topology value.
    """
    placing = _Placing(room, together, fixed or {})
    for members_ in _groups(members, together):
        if not placing.whole(members_) and not placing.postponed(members_):
            placing.undo()
            return None
    if not placing.rest():
        placing.undo()
        return None
    return placing.placement


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

    def whole(self, members: list[Member]) -> bool:
        """All of a group in one topology value; or anywhere, where there is none."""
        if self._together is None or members[0].group is None:
            self._later.append(members)
            return True
        return any(self._fill(members, nodes) for nodes in self._domains(members))

    def postponed(self, members: list[Member]) -> bool:
        """A group that only prefers to be together is spread when all that can be whole are placed."""
        assert self._together is not None
        self._later.append(members)
        return not self._together.required

    def rest(self) -> bool:
        """What may go anywhere."""
        return all(self._fill(members, list(self._room.nodes)) for members in self._later)

    def undo(self) -> None:
        self._undo_to(0)

    def _domains(self, members: list[Member]) -> list[list[str]]:
        """The nodes of each topology value, the one with most room first: a gang's groups stay near each other."""
        assert self._together is not None
        group = members[0].group
        pinned = self._fixed.get(group) if group is not None else None
        domains: dict[str, list[str]] = {}
        for name, node in self._room.nodes.items():
            value = node.labels.get(self._together.key)
            if value is not None and pinned in (None, value):
                domains.setdefault(value, []).append(name)
        counts = self._room.capacities(members[0].needs)
        room = {value: sum(counts.get(name, 0) for name in names) for value, names in domains.items()}
        started = {self._room.nodes[node].labels.get(self._together.key) for node in self.placement.values()}
        order = sorted(domains, key=lambda value: (value not in started, -room[value], value))
        return [domains[value] for value in order]

    def _fill(self, members: list[Member], nodes: list[str]) -> bool:
        """Each member onto a node of these; none of them, where one finds no room."""
        mark = len(self._taken)
        order: dict[Needs, list[str]] = {}
        # Whoever asks for most finds least room: first. Equal needs keep the order of ranks.
        for member in sorted(members, key=lambda member: _size(member.needs), reverse=True):
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
        counts = self._room.capacities(needs, nodes)

        def place_of(name: str) -> tuple[int, int, str, str]:
            node = self._room.nodes[name]
            return (-score(needs, node), -counts[name], node.labels.get(key, ""), name)

        return sorted(counts, key=place_of, reverse=True)

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
