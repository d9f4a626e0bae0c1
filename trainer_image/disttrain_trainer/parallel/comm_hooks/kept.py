"""Tensors that a rank keeps per bucket. DDP never forms its buckets anew here (parallel/data_parallel.py says why)."""

from abc import ABC
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.parallel.comm_hooks.base import HookedSum


class KeepingSum(HookedSum, ABC):
    """A sum with a memory."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        super().__init__(group, name)
        self._kept: dict[str, Tensor] = {}

    @property
    def kept(self) -> dict[str, Tensor] | None:
        return dict(self._kept)

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        self._kept = dict(kept)

    def keep(self, name: str, values: Tensor) -> None:
        """Remember `values`, which nobody writes into any more, until the next step."""
        self._kept[name] = values

    def recall(self, name: str, like: Tensor) -> Tensor:
        """Return what was kept under this name, on the device of `like`; zeros if nothing was."""
        kept = self._kept.get(name)
        return torch.zeros_like(like) if kept is None else kept.to(like.device)
