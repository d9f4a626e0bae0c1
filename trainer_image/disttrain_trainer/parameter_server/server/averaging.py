"""Server side of updates by workers: it averages their changes, including the optimizer state.

    Sync                      x += sum over the parts of a step of (weight / sum of weights) * change
    Async, BoundedStaleness   x += change / workers                     (ConSGD of Jiang et al., "Heterogeneity-aware
                              x += change / max(1, its staleness)       Distributed Parameter Servers", SIGMOD 2017;
                                                                        DynSGD of the same, with stalenessAwareRate)

Momentum and second moments are averaged by the same rule (as in Yu, Jin and Yang, "On the Linear Speedup Analysis of
Communication Efficient Momentum SGD", ICML 2019), so that workers keep nothing that could be lost with them, and a
checkpoint holds all there is. The rules are linear: with SGD, momentum and weight decay a step in Sync is that of one
process, and with one worker every optimizer's is.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from disttrain_trainer.optim.optimizers import state_names
from disttrain_trainer.parameter_server.server.shard import Shard

Key = tuple[int, int]
"""A range, and which of its tensors: 0 its numbers, then the optimizer's state in order of `state_names`."""


class AveragingShard(Shard):
    """The numbers of some ranges and the workers' optimizer state of each."""

    def tensors(self, index: int) -> list[Tensor]:
        """Return the averaged tensors of a range, one-dimensional, in their own memory."""
        state = self._state(index)
        names = state_names(self._settings)
        return [self._parameters[index].detach(), *(state[name].view(-1) for name in names)]

    def update(self, changes: Mapping[Key, Tensor], share: float) -> None:  # type: ignore[override]
        """Add `share` of the changes."""
        for (index, which), change in changes.items():
            self.tensors(index)[which].add_(change, alpha=share)
        self._changed()

    def optimizer_states(self) -> list[dict[str, Tensor]]:
        for index in range(len(self._parameters)):
            self._state(index)
        return super().optimizer_states()
