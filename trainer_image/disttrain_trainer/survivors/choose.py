"""Which state ranks go on from that start again in their pods: the newest that survives in a pod, or the checkpoint.

Pure. Every rank decides by itself on what all ranks have said, and so all decide alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Offer:
    """What a rank finds in the memory of its pod."""

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
    offer: Offer
    holder: int
    """The rank that hands it to all others: the lowest one of the pod that has it."""


def choose(offers: Sequence[Offer], checkpoint: int | None) -> Choice | str:
    """Return the newest state, or why it is none of a survivor's.

    offers: of each rank, by rank. checkpoint: step of the newest complete one; None: there is none. It is preferred to
    a state of the same step: it is whole for certain.
    """
    found = [(offer.step, -holder) for holder, offer in enumerate(offers) if offer.step is not None]
    if not found:
        reasons = dict.fromkeys(offer.why for offer in offers if offer.why)
        return "; ".join(reasons) or "no rank has left its state"
    step, holder = max(found)
    if checkpoint is not None and checkpoint >= step:
        return f"the checkpoint of step {checkpoint} is as new as the state of step {step}"
    return Choice(step, offers[-holder], -holder)
