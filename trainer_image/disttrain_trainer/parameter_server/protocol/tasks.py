"""What the manager and the workers say to each other about tasks."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Task(NamedTuple):
    """One part of the global batch of a step; parts and steps count from 0."""

    step: int
    part: int


class Result(NamedTuple):
    """What came of a task."""

    loss: float
    """Summed over samples or tokens; 0 where no update is made of it."""
    weight: float
    """Number of samples or tokens; 0 where no update is made of it."""
    samples: float
    worker: int = 0
    in_row: int = 0
    """How many tasks in a row the worker has skipped, this one included; 0: this one is used."""


LEADER = 0
"""The worker that takes the job's steps, evaluates and writes the checkpoints."""


class Verdict(StrEnum):
    """Why a worker gets no task."""

    HOLD = "hold"
    DONE = "done"
    STOP = "stop"


class CompleteStep(NamedTuple):
    """A complete step: sum of losses, number of samples or tokens, number of samples."""

    step: int
    loss: float
    weight: float
    samples: float
    skipped: int = 0
    """Parts of which no update was made."""
    worker: int = 0
    """The one that has skipped the most tasks in a row."""
    in_row: int = 0
    """How many these are."""
