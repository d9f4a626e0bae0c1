"""The one shape that the loop (train.py) knows: how a job takes its steps, whatever technique takes them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from disttrain_trainer.metrics.results import Reduction, StepResult
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State


class Strategy(Reduction, Protocol):
    """A way to take optimizer steps. All ranks of the world call its methods together."""

    stopping: bool
    """Whether the ranks have agreed to stop: some rank was told to, or knows of a checkpoint that failed."""
    saving: bool
    """Whether the ranks have agreed in the last run to write a checkpoint now, which some rank was asked for."""
    joined: bool
    """Whether the job was at work already when this rank began, as where a parameter server's worker comes anew."""

    def run(self, until: int) -> Iterator[StepResult]:
        """Take steps until `until` are done or the ranks have agreed to stop or save, and yield the result of each.

        A step is loading, forward, backward, reduction and update. A result may come later than its step; all have
        come when the iterator ends, and the state then stands between two steps on every rank.
        """

    def consistent(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """Return a context in which the state holds the parameters of exactly the steps that are done, as they are
        evaluated and saved; with `optimizer` its state, too. Called between two runs."""


@dataclass(frozen=True)
class Surroundings:
    """Environment of a strategy."""

    config: Config
    """The job's configuration."""
    world: World
    """The ranks that take steps together."""
    state: State
    must_end: Callable[[], bool]
    """Whether this rank wants all ranks to stop. Asked once per step."""
    must_save: Callable[[], bool]
    """Whether this rank wants all ranks to write a checkpoint. Asked once per step."""
    updated: Callable[[], None]
    """Called after each of this rank's updates."""
    computed: Callable[[], None] = lambda: None
    """Called after the passes of a step that all ranks take together."""
    agree: Callable[[], None] = lambda: None
    """Called by all ranks together once nothing but the update of such a step is left."""
