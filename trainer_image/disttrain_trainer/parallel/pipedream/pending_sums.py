"""Sums over ranks that are in different steps; they arrive later."""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class PendingSums:
    """Sums over all ranks. Each adds as many numbers as the others, in the same order, at its own time."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """group: of all ranks, on gloo, for nothing else."""
        self._group = group
        self._pending: deque[tuple[dist.Work, Tensor]] = deque()

    def start(self, numbers: Sequence[float]) -> None:
        """Add this rank's part of the next sums; does not wait."""
        values = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        self._pending.append((work, values))

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once."""
        return bool(self._pending) and self._pending[0][0].is_completed()

    def wait(self) -> list[float]:
        """Return the oldest sums that were not returned yet; waits for them."""
        work, values = self._pending.popleft()
        work.wait()
        return values.tolist()
