"""Which few numbers of a gradient are sent, and what becomes of the others. Pure functions of 1-D tensors.

What is not sent is kept and added to the next gradient (error feedback; Stich et al. 2018, algorithm 1).
"""

import math

import numpy as np
import torch
from torch import Tensor

DEFAULT_RATIO = 0.01


def kept_count(size: int, ratio: float) -> int:
    """Numbers of `size` that are sent: `ratio` of them, rounded up, so at least one."""
    return min(size, math.ceil(ratio * size))


def ratio_at(step: int, ratio: float, warmup_steps: int) -> float:
    """The ratio of a step, counted from 0: falling from 1 exponentially to `ratio` (Lin et al. 2018, section 3.3)."""
    return ratio if step >= warmup_steps else ratio ** (step / warmup_steps)


def largest(values: Tensor, count: int) -> Tensor:
    """Indices [count] of the largest magnitudes, ascending."""
    return values.abs().topk(count, sorted=False).indices.sort().values


def random_indices(size: int, count: int, seeds: tuple[int, ...], device: torch.device) -> Tensor:
    """`count` different indices below `size`: of these seeds always the same, on every rank with such a device."""
    generator = torch.Generator(device)
    # Well mixed: of a plain number torch's generator on CPUs reads the lower 32 bits alone.
    generator.manual_seed(int(np.random.SeedSequence(seeds).generate_state(1)[0]))
    return torch.randperm(size, generator=generator, device=device)[:count]


def with_momentum(gradient: Tensor, velocity: Tensor | None, momentum: float) -> Tensor:
    """Return what is added to the residual: the gradient, or with momentum correction this rank's velocity (Lin et al.
    2018, equation 4), so that numbers that are sent late have as much momentum as those sent at once.
    """
    return gradient.clone() if velocity is None else velocity * momentum + gradient


def without(values: Tensor, indices: Tensor) -> Tensor:
    """Return what is kept: the same with zeros at `indices`; for a velocity, the momentum factor masking of section
    3.2."""
    return values.index_fill(0, indices, 0)
