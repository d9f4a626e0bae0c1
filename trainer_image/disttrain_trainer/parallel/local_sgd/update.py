"""Updates from the average of the replicas: functions of tensors, after the papers' formulas."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Block:
    """Result of a block, each tensor in the shape of the parameter."""

    model: Tensor
    """The global model, which is evaluated, saved and returned."""
    start: Tensor
    """Where the replicas' next block begins."""
    momentum: Tensor
    """What the next update is told."""


class Update(Protocol):
    """How a block ends: previous is the global model before it, mean the average of the replicas after it."""

    def __call__(self, previous: Tensor, mean: Tensor, momentum: Tensor) -> Block: ...


@dataclass(frozen=True)
class BlockMomentum:
    """Block-wise model update filtering (Chen and Huo, ICASSP 2016).

    G = mean - V(t-1); D(t) = momentum D(t-1) + rate G; W(t) = W(t-1) + D(t). The next block starts at V(t), which is
    W(t), or with Nesterov's momentum W(t) + momentum D(t).
    """

    momentum: float
    rate: float
    nesterov: bool

    def __call__(self, previous: Tensor, mean: Tensor, momentum: Tensor) -> Block:
        carried = self.momentum * momentum
        change = mean - (previous + carried if self.nesterov else previous)
        filtered = carried + self.rate * change
        # W(t-1) + D(t), written so that momentum 0 and rate 1 give the mean's own bits.
        model = mean + (self.rate - 1) * change
        if self.nesterov:
            return Block(model, model + self.momentum * filtered, filtered)
        model = model + carried
        return Block(model, model, filtered)


@dataclass(frozen=True)
class OuterSgd:
    """DiLoCo's outer step (Douillard et al. 2023, algorithm 1): Nesterov SGD, as torch's, on previous - mean."""

    rate: float
    momentum: float

    def __call__(self, previous: Tensor, mean: Tensor, momentum: Tensor) -> Block:
        gradient = previous - mean
        velocity = self.momentum * momentum + gradient
        model = previous - self.rate * (gradient + self.momentum * velocity)
        return Block(model, model, velocity)


def default_block_momentum(replicas: int) -> float:
    """1 - 1 / replicas (Chen and Huo 2016): the mean of N changes then weighs in the end as their sum."""
    return 1 - 1 / replicas
