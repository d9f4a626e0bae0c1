"""Which state ranks go on from that start again in their pods: the newest that survives in pods, or the checkpoint.

Pure. Every rank decides by itself on what all ranks have said, and so all decide alike.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Part = tuple[tuple[str, int], ...]
"""A part of the model's state, as Mesh.part has it."""
_NAMED = 3
"""Parts that a reason names."""


@dataclass(frozen=True)
class Offer:
    """What a rank finds in the memory of its pod of the part of the model that it holds."""

    step: int | None = None
    """The last one that is in the state there; None: there is none."""
    left_by: int = 0
    """The rank that has left it, in its former life."""
    uncalled: bool = False
    """Whether callbacks were not called after this step."""
    due: bool = False
    """Whether what is due after this step may not have been done."""
    why: str = ""
    """Why there is no state, where that is known."""


@dataclass(frozen=True)
class Choice:
    """The state to go on from."""

    step: int
    sources: tuple[int, ...]
    """For each rank the one that hands its part to it: the lowest one whose pod has that part of this step."""


def choose(offers: Sequence[Offer], parts: Sequence[Part], checkpoint: int | None) -> Choice | str:
    """Return the newest step of which every part survives, or why there is none that is to be used.

    offers, parts: of each rank, by rank. checkpoint: step of the newest complete one; None: there is none. It is
    preferred to a state of the same step: it is whole for certain.
    """
    sources: dict[int, dict[Part, int]] = {}
    for rank, (offer, part) in enumerate(zip(offers, parts, strict=True)):
        if offer.step is not None:
            sources.setdefault(offer.step, {}).setdefault(part, rank)
    every = set(parts)
    whole = [step for step, found in sources.items() if found.keys() == every]
    if not whole:
        return _why(offers, parts)
    step = max(whole)
    if checkpoint is not None and checkpoint >= step:
        return f"the checkpoint of step {checkpoint} is as new as the state of step {step}"
    return Choice(step, tuple(sources[step][part] for part in parts))


def _why(offers: Sequence[Offer], parts: Sequence[Part]) -> str:
    """Return why no step has every part."""
    steps: dict[Part, set[int]] = {part: set() for part in parts}
    for offer, part in zip(offers, parts, strict=True):
        if offer.step is not None:
            steps[part].add(offer.step)
    lacking = [part for part, found in steps.items() if not found]
    if not lacking:
        left = (f"{_in_words(part)} of step {max(found)}" for part, found in steps.items())
        return f"the parts that are left are of different steps: {_some(left)}"
    reasons = "; ".join(
        dict.fromkeys(offer.why for offer, part in zip(offers, parts, strict=True) if offer.why and part in lacking)
    )
    if len(lacking) == len(steps):
        return reasons or "no rank has left its state"
    number = "part" if len(lacking) == 1 else "parts"
    return f"no rank has left the {number} at {_some(map(_in_words, lacking))}{reasons and f': {reasons}'}"


def _in_words(part: Part) -> str:
    return " ".join(f"{axis} {index}" for axis, index in part)


def _some(texts: Iterable[str]) -> str:
    first = list(texts)
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return ", ".join(first[:_NAMED]) + more
