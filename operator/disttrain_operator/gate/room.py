"""Free capacity of each node, and how many pods of a kind fit there.

A cycle of the gate asks the same of thousands of nodes for each waiting gang, so what was counted is kept, and counted
anew only for nodes on which something has changed. Nodes that are alike are judged once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from disttrain_operator.gate.fit import Needs, NodeFacts, capacity, lacking, unfit

Used = Mapping[str, Mapping[str, int]]
"""Name of a node -> resource -> what is taken of it."""
_Amounts = frozenset[tuple[str, int]]


@dataclass
class _Count:
    """How many pods of one kind each node can take, as of a number of changes to the room."""

    needs: Needs
    by_node: dict[str, int] = field(default_factory=dict)
    """Only nodes that can take any."""
    total: int = 0
    by_value: dict[str, dict[str, int]] = field(default_factory=dict)
    """Key of a label -> value -> how many the nodes with this value can take."""
    known: dict[_Amounts, int] = field(default_factory=dict)
    """What is free on a node -> how many fit there."""
    changes: int = -1


class Room:
    """Nodes with what is free on them."""

    def __init__(self, nodes: Iterable[NodeFacts], used: Used | None = None, like: "Room | None" = None) -> None:
        """`used`: what is taken, by the node's name. `like`: a room of the same nodes, whose findings are shared."""
        self.nodes = {node.name: node for node in sorted(nodes, key=lambda node: node.name)}
        self.free = {name: dict(node.allocatable) for name, node in self.nodes.items()}
        self._like = like
        self._unfit: dict[Needs, dict[str, str]] = {}
        self._alike: dict[str, object] | None = None
        self._counts: dict[Needs, _Count] = {}
        self._changed: list[str] = []
        self._amounts: dict[str, _Amounts] = {}
        self._removed: dict[str, NodeFacts] = {}
        for name, amounts in (used or {}).items():
            self.take(name, amounts.items())

    def copy(self) -> "Room":
        """A room of its own with the same nodes and the same free amounts."""
        made = Room((), like=self._like or self)
        made.nodes = dict(self.nodes)
        made.free = {name: dict(amounts) for name, amounts in self.free.items()}
        return made

    def take(self, node: str, requests: Iterable[tuple[str, int]]) -> None:
        """Less is free on the node, which need not exist."""
        free = self.free.get(node)
        if free is not None:
            for resource, value in requests:
                free[resource] = free.get(resource, 0) - value
            self._note(node)

    def give_back(self, node: str, requests: Iterable[tuple[str, int]]) -> None:
        """The opposite of `take`."""
        self.take(node, ((resource, -value) for resource, value in requests))

    def remove(self, names: Iterable[str]) -> None:
        """These nodes are no longer part of the room."""
        for name in names:
            node = self.nodes.pop(name, None)
            if node is not None:
                self._removed[name] = node
                del self.free[name]
                self._note(name)

    def unfit(self, needs: Needs) -> Mapping[str, str]:
        """The nodes where such a pod may not run however empty they are, and why. Asked often, found out once."""
        if self._like is not None:
            return self._like.unfit(needs)
        if needs not in self._unfit:
            self._unfit[needs] = self._find_unfit(needs)
        return self._unfit[needs]

    def capacities(self, needs: Needs) -> Mapping[str, int]:
        """How many such pods each node can take now; only nodes that can take any."""
        return self._count(needs).by_node

    def total(self, needs: Needs) -> int:
        """How many such pods all nodes can take now."""
        return self._count(needs).total

    def totals(self, needs: Needs, key: str) -> Mapping[str, int]:
        """How many such pods the nodes with each value of a label can take now."""
        count = self._count(needs)
        if key not in count.by_value:
            totals = count.by_value[key] = dict[str, int]()
            for name, number in count.by_node.items():
                value = self.nodes[name].labels.get(key)
                if value is not None:
                    totals[value] = totals.get(value, 0) + number
        return count.by_value[key]

    def has_room(self, needs: Needs, node: str) -> bool:
        """Whether the node, where such a pod may run, can take one now."""
        return capacity(needs, self.free[node]) > 0

    def lacking(self, needs: Needs) -> dict[str, str]:
        """The nodes where such a pod may run and has no room now -> the first resource of which too little is free."""
        unfit_, capacities = self.unfit(needs), self.capacities(needs)
        known: dict[_Amounts, str | None] = {}
        found: dict[str, str] = {}
        for name in self.nodes:
            if name in unfit_ or name in capacities:
                continue
            amounts = self._free_amounts(name)
            if amounts not in known:
                known[amounts] = lacking(needs, self.free[name])
            resource = known[amounts]
            if resource is not None:
                found[name] = resource
        return found

    def _find_unfit(self, needs: Needs) -> dict[str, str]:
        if needs.node_selector or needs.terms is not None:
            causes = ((name, unfit(needs, node)) for name, node in self.nodes.items())
            return {name: cause for name, cause in causes if cause is not None}
        if self._alike is None:
            # Labels, in which each node differs from all others, do not count here.
            self._alike = {
                name: (node.ready, node.unschedulable, node.taints, frozenset(node.allocatable.items()))
                for name, node in self.nodes.items()
            }
        known: dict[object, str | None] = {}
        found: dict[str, str] = {}
        for name, kind in self._alike.items():
            if kind not in known:
                known[kind] = unfit(needs, self.nodes[name])
            cause = known[kind]
            if cause is not None:
                found[name] = cause
        return found

    def _count(self, needs: Needs) -> _Count:
        count = self._counts.get(needs)
        if count is None:
            count = self._counts[needs] = _Count(needs)
        if count.changes != len(self._changed):
            self._recount(count, set(self._changed[count.changes :] if count.changes >= 0 else self.nodes))
            count.changes = len(self._changed)
        return count

    def _recount(self, count: _Count, names: set[str]) -> None:
        unfit_ = self.unfit(count.needs)
        for name in names:
            number = 0 if name not in self.nodes or name in unfit_ else self._fitting(count, name)
            before = count.by_node.get(name, 0)
            if number == before:
                continue
            count.total += number - before
            if number:
                count.by_node[name] = number
            else:
                del count.by_node[name]
            for key, totals in count.by_value.items():
                node = self.nodes.get(name) or self._removed[name]
                value = node.labels.get(key)
                if value is not None:
                    totals[value] = totals.get(value, 0) + number - before

    def _fitting(self, count: _Count, name: str) -> int:
        amounts = self._free_amounts(name)
        number = count.known.get(amounts)
        if number is None:
            number = count.known[amounts] = capacity(count.needs, self.free[name])
        return number

    def _free_amounts(self, name: str) -> _Amounts:
        amounts = self._amounts.get(name)
        if amounts is None:
            amounts = self._amounts[name] = frozenset(self.free[name].items())
        return amounts

    def _note(self, name: str) -> None:
        self._changed.append(name)
        self._amounts.pop(name, None)
