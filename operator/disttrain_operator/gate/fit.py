"""May this pod run on that node? What the cluster's scheduler would say of room, taints, selectors and node affinity.

Not looked at: affinity between pods, spread constraints, volumes bound to nodes, host ports. A pod that fails on one of
them is taken back by the gate some time after its release.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from disttrain_operator.gate.quantities import Amounts, whole_number

PODS = "pods"
"""The resource of which every pod takes one."""
UNSCHEDULABLE_TAINT = "node.kubernetes.io/unschedulable"


@dataclass(frozen=True)
class Requirement:
    """One line of a node selector term."""

    key: str
    operator: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Term:
    """A node selector term: all of its lines must hold. One without lines matches no node."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Toleration:
    """A pod's toleration; an empty key or effect stands for all."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


@dataclass(frozen=True)
class Taint:
    """A node's taint."""

    key: str
    effect: str
    value: str = ""


@dataclass(frozen=True)
class Needs:
    """Requirements of a pod for a node. Pods of one template have equal needs."""

    requests: tuple[tuple[str, int], ...] = ()
    """Effective requests, one of the resource `pods` among them, by name."""
    node_selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] | None = None
    """Required node affinity: one of the terms must match. None: there is none."""
    preferred: tuple[tuple[int, Term], ...] = ()
    """Preferred node affinity, with weights."""
    tolerations: tuple[Toleration, ...] = ()

    _hash: int = field(init=False, repr=False, compare=False)
    """Known once: it is asked for each pod of a gang many times in a cycle."""

    def __post_init__(self) -> None:
        parts = (self.requests, self.node_selector, self.terms, self.preferred, self.tolerations)
        object.__setattr__(self, "_hash", hash(parts))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class NodeFacts:
    """Facts of a node that the gate uses."""

    name: str
    allocatable: Amounts
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False
    ready: bool = True


def unfit(needs: Needs, node: NodeFacts) -> str | None:
    """Why the pod may not run on the node however empty it is, as the end of a sentence on several nodes."""
    if not node.ready:
        return "are not ready"
    if node.unschedulable and not _tolerated(Taint(UNSCHEDULABLE_TAINT, "NoSchedule"), needs):
        return "are cordoned"
    for taint in node.taints:
        if taint.effect in ("NoSchedule", "NoExecute") and not _tolerated(taint, needs):
            return f"are tainted {taint.key}"
    if any(node.labels.get(key) != value for key, value in needs.node_selector):
        return "do not match the nodeSelector"
    if needs.terms is not None and not any(matches(term, node) for term in needs.terms):
        return "do not match the node affinity"
    for resource, wanted in needs.requests:
        if wanted > node.allocatable.get(resource, 0):
            return f"are too small in {resource}"
    return None


def lacking(needs: Needs, free: Amounts) -> str | None:
    """The first resource of which too little is free."""
    return next((resource for resource, wanted in needs.requests if wanted > max(free.get(resource, 0), 0)), None)


def capacity(needs: Needs, free: Amounts) -> int:
    """How many such pods fit into this room."""
    least = -1
    for resource, wanted in needs.requests:
        count = free.get(resource, 0) // wanted if wanted > 0 else least
        if count <= 0 and wanted > 0:
            return 0
        if least < 0 or count < least:
            least = count
    return max(least, 0)


def score(needs: Needs, node: NodeFacts) -> int:
    """How much the pod prefers the node."""
    liked = sum(weight for weight, term in needs.preferred if matches(term, node))
    disliked = sum(taint.effect == "PreferNoSchedule" and not _tolerated(taint, needs) for taint in node.taints)
    return liked - disliked


def matches(term: Term, node: NodeFacts) -> bool:
    """Whether the node meets every line of the term."""
    if not term.labels and not term.fields:
        return False
    fields = {"metadata.name": node.name}
    return all(_holds(line, node.labels) for line in term.labels) and all(_holds(line, fields) for line in term.fields)


def _holds(line: Requirement, values: Mapping[str, str]) -> bool:
    value = values.get(line.key)
    match line.operator:
        case "In":
            return value in line.values
        case "NotIn":
            return value not in line.values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt":
            found, bound = whole_number(value), whole_number(line.values[0]) if line.values else None
            if found is None or bound is None:
                return False
            return found > bound if line.operator == "Gt" else found < bound
        case _:
            return False


def _tolerated(taint: Taint, needs: Needs) -> bool:
    return any(_tolerates(toleration, taint) for toleration in needs.tolerations)


def _tolerates(toleration: Toleration, taint: Taint) -> bool:
    if toleration.effect not in ("", taint.effect):
        return False
    if toleration.operator == "Exists":
        return toleration.key in ("", taint.key)
    return toleration.operator == "Equal" and (toleration.key, toleration.value) == (taint.key, taint.value)
