"""Whether some rank was asked to stop, or to save, and who is slow: what all ranks learn at the end of the same step.

The sums over the ranks are sent before the last update of a step, so that nobody waits for it after the update.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from disttrain_trainer.runtime.config import COLLECTIVE_TIMEOUT
from disttrain_trainer.runtime.mesh import World


class Asked(NamedTuple):
    """What some rank was asked for."""

    stop: bool
    save: bool
    look: bool = False
    """Whether the time of each rank in the next step is wanted."""
    seconds: tuple[float, ...] = ()
    """That time of each rank in this step, if it was wanted."""


Answer = Callable[[], Asked]
"""Waits for the sums, and returns which of them are positive, and those of the times."""


class StopAgreement:
    """One question to all ranks per step. ask: sends it with what this rank knows now."""

    def __init__(self, ask: Callable[[], Answer]) -> None:
        self._ask = ask
        self._updates = self._updates_before = 0
        self._asked: Answer | None = None

    def watch(self, optimizers: Iterable[Optimizer]) -> None:
        """Ask before the last update that these make in a step."""
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)

    def asked(self) -> Asked:
        """Return what some rank was asked for, as far as each knew when it asked in this step. Called once per step."""
        answer, self._asked = self._asked or self._ask(), None
        self._updates, self._updates_before = 0, self._updates
        return answer()

    def _before_update(self, *_: Any) -> None:
        # Taken to be the last one where the step before had as many. Each rank may be wrong: it asks once all the same.
        self._updates += 1
        if self._updates == self._updates_before:
            self._asked = self._ask()


def question_to_all(world: World, requested: Answer) -> Callable[[], Answer]:
    """Return how to ask what some rank was asked for. requested: what this one was."""
    if world.size == 1:
        return lambda: requested
    # Ranks may ask at different places in the script, so this must not meet the script's collectives in one group.
    group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)

    def ask() -> Answer:
        stop, save, look, seconds = requested()
        sums = torch.tensor([stop, save, look, *seconds], dtype=torch.float32)
        work = dist.all_reduce(sums, group=group, async_op=True)

        def answer() -> Asked:
            assert work is not None
            work.wait()
            stops, saves, looks = (sums[:3] > 0).tolist()
            return Asked(stops, saves, looks, tuple(sums[3:].tolist()))

        return answer

    return ask
