"""What the manager and the workers say to each other about tasks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Task(NamedTuple):
    """One part of the global batch of a step; parts and steps count from 0."""

    step: int
    part: int


Result = tuple[float, float, float]
"""Loss (summed), weight and samples of a task."""

LEADER = 0
"""The worker that takes the job's steps, evaluates and writes the checkpoints."""


class Verdict(StrEnum):
    """Why a worker gets no task."""

    HOLD = "hold"
    DONE = "done"
    STOP = "stop"


@dataclass(frozen=True)
class CompleteStep:
    """A complete step: sum of losses, number of samples or tokens, number of samples."""

    step: int
    loss: float
    weight: float
    samples: float
