"""Learning rate as a closed form of the step: nothing to keep in a checkpoint."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from disttrain_api.training import LrSchedule, LrScheduleName, Training
from disttrain_trainer.runtime.entrypoint import import_entrypoint
from disttrain_trainer.runtime.errors import InvalidConfiguration


def rate_factor(schedule: LrSchedule, step: int, steps: int) -> float:
    """Rate of the step with index `step` (from 0) of `steps`, as a part of the peak.

    Warm-up: (step + 1) / warmupSteps, so the first step already moves and step warmupSteps - 1 has the peak.
    Then, with progress p from 0 at the first step after the warm-up to 1 at the last step, and m the minimum ratio:
    Constant 1, or what the user's own function returns; Linear 1 - p (1 - m);
    Cosine m + (1 - m) (1 + cos(pi p)) / 2 (Loshchilov and Hutter 2017, no restarts).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    if schedule.entrypoint is not None:
        return _own(schedule, step, steps)
    if schedule.name is LrScheduleName.CONSTANT:
        return 1.0
    minimum = schedule.minimum_ratio or 0.0
    progress = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
    if schedule.name is LrScheduleName.LINEAR:
        return 1.0 - progress * (1.0 - minimum)
    return minimum + (1.0 - minimum) * (1.0 + math.cos(math.pi * progress)) / 2.0


def learning_rate(training: Training, step: int) -> float:
    """Learning rate of the step with index `step`, from 0."""
    return training.optimizer.learning_rate * rate_factor(training.lr_schedule, step, training.steps)


def _own(schedule: LrSchedule, step: int, steps: int) -> float:
    """Return the result of the user's function for the step. Raises InvalidConfiguration if it is no factor."""
    assert schedule.entrypoint is not None
    found = _function(schedule.entrypoint)(step, steps)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise InvalidConfiguration(
            f"`training.lrSchedule.entrypoint`: {schedule.entrypoint} returned {found!r:.80} for step {step} of "
            f"{steps}, expected a number from 0 on: the rate as a part of the peak"
        )
    return float(found)


@lru_cache(maxsize=8)
def _function(entrypoint: str) -> Callable[..., Any]:
    return import_entrypoint("training.lrSchedule", entrypoint)
