"""How often each expert is chosen for a microbatch in the layers of all stages, for losses that are one of all layers.

The numbers take the way of activations and gradients: forward each stage adds its own to those that came and hands them
on, backward the last stage's sum goes to all. So a message is there when the activation or the gradient is that the
stage has waited for.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PooledAssignments:
    """Holds how many tokens each expert is assigned, [E], of each microbatch that is in the pipeline, by its number."""

    def __init__(self, experts: int, index_of_stage: Sequence[int], group: dist.ProcessGroup) -> None:
        """experts: E; index_of_stage: the pipeline index of each; group: the ranks of the pipeline."""
        self._experts, self._index_of, self._group = experts, index_of_stage, group
        self._own = dist.get_rank(group)
        self._last = len(index_of_stage) - 1
        self._here: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def add(self, stage: int, microbatch: int, chosen: Iterable[Tensor]) -> None:
        """Add what the stage has counted of a microbatch, and send the sum on.

        chosen: the counts of each of the stage's layers, on all ranks that have these.
        """
        total = torch.zeros(self._experts, dtype=torch.int64)
        for of_layer in chosen:
            total += of_layer.to(total.device)
        if stage:
            total += self._take(stage - 1, stage, microbatch)
        if stage == self._last:
            self._sums[microbatch] = total
        else:
            self._hand(total, stage, stage + 1, microbatch)

    def arrive(self, stage: int, microbatch: int) -> None:
        """Receive the sum of all stages before the stage computes a microbatch's gradients, and send it back."""
        if stage < self._last:
            self._sums[microbatch] = self._take(stage + 1, stage, microbatch)
        if stage:
            self._hand(self._sums[microbatch], stage, stage - 1, microbatch)

    def of(self, microbatch: int) -> Tensor:
        """Return the sum of all stages, once a stage of this rank computes the gradients of the microbatch."""
        return self._sums[microbatch]

    def end_pass(self) -> None:
        """Wait until all messages are sent."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _hand(self, total: Tensor, stage: int, to: int, microbatch: int) -> None:
        tag, index = self._tag(stage, to, microbatch), self._index_of[to]
        if index == self._own:
            self._here[tag] = total
            return
        work = dist.isend(total, dist.get_global_rank(self._group, index), self._group, tag)
        assert work is not None
        self._sent.append((work, total))

    def _take(self, stage: int, to: int, microbatch: int) -> Tensor:
        tag, index = self._tag(stage, to, microbatch), self._index_of[stage]
        if index == self._own:
            return self._here.pop(tag)
        total = torch.empty(self._experts, dtype=torch.int64)
        dist.recv(total, dist.get_global_rank(self._group, index), self._group, tag)
        return total

    def _tag(self, stage: int, to: int, microbatch: int) -> int:
        """From 1 on: 0 is that of torch's own messages."""
        return 1 + 2 * (microbatch * len(self._index_of) + to) + (stage < to)
