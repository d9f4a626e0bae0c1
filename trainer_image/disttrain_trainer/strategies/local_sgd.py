"""Steps that each replica takes alone, with averages of parameters now and then: local SGD, DiLoCo, BMUF.

When replicas meet, and what becomes of their average: parallel/local_sgd.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from disttrain_trainer.step import accumulate_gradients
from disttrain_trainer.strategies.base import Surroundings
from disttrain_trainer.strategies.synchronous import Batch, Synchronous


class LocalSgd(Synchronous):
    """See `Strategy`. Ranks count and stop together as in synchronous steps; their gradients are their own."""

    def __init__(self, around: Surroundings) -> None:
        super().__init__(around, own_norms=True)
        assert around.state.replicas is not None
        self._replicas = around.state.replicas

    def consistent(self, *, optimizer: bool) -> AbstractContextManager[None]:
        """Return a context in which all replicas hold the model that counts."""
        return self._replicas.agreed(self.state.step, optimizer=optimizer)

    def compute_gradients(self, batch: Batch, weight: float, samples: float) -> Tensor:
        done = self.state.step
        if self._replicas.alone(done):
            # The gradient is that of the mean over this replica's own samples; the loss is its part of the mean of all.
            own_weight = batch.weight
            loss = accumulate_gradients(
                self.state, batch.microbatches, own_weight or 1.0, batch.samples or 1.0, 1, self.clock
            )
            loss = loss * (own_weight / (weight or 1.0))
        else:
            loss = super().compute_gradients(batch, weight, samples)
        self._replicas.settle_gradients(done)
        return loss

    def judged_norm(self, norm: Callable[[], Tensor]) -> float:
        done, guard = self.state.step, self.state.guard
        if guard is not None and done > 0 and self._replicas.alone(done) and not self._replicas.alone(done - 1):
            # Those before were of the sum of all gradients, in which what is by chance is smaller.
            guard.forget_norms()
        # Replicas skip a step together, so that all have done as many. The largest of NaN and a number is either.
        own = norm().nan_to_num(nan=math.inf, posinf=math.inf)
        return self.world.max_tensor(own).item()

    def end_step(self) -> int | None:
        self._replicas.synchronize(self.state.step)
        return self._replicas.bytes
