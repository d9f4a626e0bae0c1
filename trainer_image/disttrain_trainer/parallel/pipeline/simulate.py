"""Time of a schedule's own table of actions if every action takes its measured time.

No transfer takes time here and no rank waits for anything but what an action needs, so the idle part that comes out is
the schedule's own: for GPipe and 1F1B with p equal stages and m microbatches (p - 1) / (m + p - 1), for the interleaved
one with v stages per rank (p - 1) / (v m + p - 1) (Narayanan et al. 2021, section 2.2).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A computation of a stage on a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and parameters."""
    INPUTS = "I"
    """Gradients of the inputs only."""
    PARAMETERS = "W"
    """Gradients of the parameters, after INPUTS."""


@dataclass(frozen=True)
class Action:
    """One computation of a rank."""

    kind: Kind
    stage: int
    microbatch: int


Table = Mapping[int, Sequence[Action]]
"""The actions of each pipeline index, in order."""
Seconds = Mapping[tuple[Kind, int], float]
"""What an action of a kind takes in a stage."""


def splits_backward(table: Table) -> bool:
    """Return whether gradients of parameters are computed apart from those of the inputs, of some microbatches."""
    return any(action.kind is Kind.PARAMETERS for actions in table.values() for action in actions)


def idle_part(table: Table, seconds: Seconds) -> float:
    """The bubble: part of the step, 0 to 1, in which a rank has nothing to do, averaged over the ranks.

    Raises ValueError where the actions wait for each other.
    """
    step = max(end_times(table, seconds).values())
    busy = sum(seconds[action.kind, action.stage] for actions in table.values() for action in actions)
    return 1 - busy / (step * len(table)) if step else 0.0


def end_times(table: Table, seconds: Seconds) -> dict[Action, float]:
    """When each action ends if every rank begins each as soon as its turn has come and what it needs is there."""
    last_stage = max(action.stage for actions in table.values() for action in actions)
    # Schedules that split the backward pass do so for some microbatches only.
    split = {action for actions in table.values() for action in actions if action.kind is Kind.INPUTS}
    ends: dict[Action, float] = {}
    free = dict.fromkeys(table, 0.0)
    position = dict.fromkeys(table, 0)
    while any(position[rank] < len(actions) for rank, actions in table.items()):
        moved = False
        for rank, actions in table.items():
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = [ends.get(need) for need in _needs(action, last_stage, split)]
                if any(end is None for end in needed):
                    break
                begin = max([free[rank], *(end for end in needed if end is not None)])
                ends[action] = free[rank] = begin + seconds[action.kind, action.stage]
                position[rank] += 1
                moved = True
        if not moved:
            raise ValueError(f"the schedule's actions wait for each other: {position} of {table}")
    return ends


def _needs(action: Action, last_stage: int, split: Collection[Action]) -> list[Action]:
    """The actions that must have ended before this one begins. split: all actions of the kind INPUTS."""
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind is Kind.PARAMETERS:
        return [Action(Kind.INPUTS, stage, microbatch)]
    if kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, microbatch)] if stage else []
    own = Action(Kind.FORWARD, stage, microbatch)
    if stage == last_stage:
        return [own]
    inputs = Action(Kind.INPUTS, stage + 1, microbatch)
    return [own, inputs if inputs in split else Action(Kind.BACKWARD, stage + 1, microbatch)]
