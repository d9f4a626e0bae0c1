"""Why a gang does not fit, in one sentence with the numbers."""

from collections import Counter
from collections.abc import Sequence

from disttrain_operator.gate.fit import PODS, Needs
from disttrain_operator.gate.place import Member, Together
from disttrain_operator.gate.quantities import spell
from disttrain_operator.gate.room import Room

MAX_CAUSES = 6


def why_not(members: Sequence[Member], together: Together | None, room: Room) -> str:
    """For example: needs 8 pods x 8 nvidia.com/gpu; 5 fit: of 12 nodes 3 have too little nvidia.com/gpu free, …"""
    kinds = Counter(member.needs for member in members)
    sentences = [_of_kind(needs, count, room) for needs, count in kinds.items()]
    fitting = [_fitting(needs, count, room) for needs, count in kinds.items()]
    text = "; ".join(sentences)
    if all(count <= fits for count, fits in zip(kinds.values(), fitting, strict=True)):
        # One by one they fit: what is missing is room in the same place.
        text += f"; no value of node label {together.key} has room for a whole group" if together else ""
        text += "; not all of them at once" if len(kinds) > 1 else ""
    return f"needs {text}"


def _fitting(needs: Needs, count: int, room: Room) -> int:
    return min(count, room.total(needs))


def _of_kind(needs: Needs, count: int, room: Room) -> str:
    fits = _fitting(needs, count, room)
    wanted = f"{count} pod{'s' if count > 1 else ''} x {_spelled(needs)}"
    causes = _causes(needs, room)
    if fits >= count or not causes:
        return f"{wanted}; {fits} fit" + ("" if room.nodes else ": the cluster has no nodes")
    listed = ", ".join(f"{number} {_singular(cause, number)}" for cause, number in causes.most_common(MAX_CAUSES))
    return f"{wanted}; {fits} fit: of {len(room.nodes)} nodes {listed}"


def _causes(needs: Needs, room: Room) -> Counter[str]:
    """Return what keeps a further pod from each node."""
    unfit = room.unfit(needs)
    causes = Counter(cause for name, cause in unfit.items() if name in room.nodes)
    for resource in room.lacking(needs).values():
        causes["have room for no further pod" if resource == PODS else f"have too little {resource} free"] += 1
    return causes


def _singular(cause: str, number: int) -> str:
    if number > 1:
        return cause
    for plural, singular in (("are ", "is "), ("have ", "has "), ("do ", "does ")):
        if cause.startswith(plural):
            return singular + cause.removeprefix(plural)
    return cause


def _spelled(needs: Needs) -> str:
    wanted = [(name, value) for name, value in needs.requests if name != PODS and value]
    # Where a pod asks for devices, nothing else is scarce as a rule; the causes name it where it is.
    chosen = [entry for entry in wanted if "/" in entry[0]] or wanted
    return " and ".join(f"{spell(name, value)} {name}" for name, value in chosen) or "no requests"
