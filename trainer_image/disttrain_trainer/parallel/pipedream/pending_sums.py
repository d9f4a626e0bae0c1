"""Sums over ranks that are in different steps; they arrive later."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PendingSums:
    """Sums over all ranks. Each says as many numbers as the others, in the same order, when it comes to it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """group: of all ranks, on gloo, for nothing else."""
        self._group = group
        self._coming: deque[tuple[dist.Work, Tensor]] = deque()

    def say(self, numbers: Sequence[float]) -> None:
        """This rank's part of the next sums; goes on at once."""
        values = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        self._coming.append((work, values))

    @property
    def arrived(self) -> bool:
        """Whether `hear` would not wait."""
        return bool(self._coming) and self._coming[0][0].is_completed()

    def hear(self) -> list[float]:
        """The oldest sums that were not heard yet."""
        work, values = self._coming.popleft()
        work.wait()
        return values.tolist()
