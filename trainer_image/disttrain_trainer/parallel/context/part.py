"""This rank's part of every sequence, whichever way attention sees those of the others."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.protocols import ContextPart
from disttrain_trainer.runtime.errors import InvalidConfiguration

SETTING = "`parallelism.contextParallelDegree`"
METHOD = "`parallelism.contextParallelMethod`"


class Context(ContextPart, ABC):
    """See ContextPart."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.index, self.degree = dist.get_rank(group), dist.get_world_size(group)

    @property
    @abstractmethod
    def pieces(self) -> int:
        """Number of pieces of equal length that sequences are cut into."""

    @abstractmethod
    def positions(self, tokens: int, device: torch.device) -> Tensor: ...

    @abstractmethod
    def causal_attention(
        self, query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0, scale: float | None = None
    ) -> Tensor: ...

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention: Callable[..., Tensor]) -> Tensor: ...

    def stay_out_of_graphs(self) -> None:
        """Have compiled layers call attention as it is: between ranks it sends what no graph holds."""
        for name in ("causal_attention", "attend"):
            setattr(self, name, torch.compiler.disable(getattr(self, name)))

    def part_of(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens [B, T / c, ...] and their classes [B, T / c]. Raises InvalidConfiguration."""
        if targets.dim() != 2 or targets.is_floating_point() or inputs.shape[:2] != targets.shape:
            raise InvalidConfiguration(
                f"{SETTING} needs samples of `training.data` with a class for each of T tokens: inputs [T, ...] and "
                f"targets [T] of whole numbers, found {list(inputs.shape[1:])} and {list(targets.shape[1:])} "
                f"({str(targets.dtype).removeprefix('torch.')})"
            )
        length = targets.shape[1]
        if length % self.pieces:
            raise InvalidConfiguration(
                f"{SETTING}: the sequences of `training.data` are {length} long, which must be a multiple of "
                f"{self.pieces}"
            )
        own = self.positions(length // self.degree, targets.device)
        return inputs[:, own], targets[:, own]
