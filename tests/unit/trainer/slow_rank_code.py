"""Models and data of which rank 1 works longer than others, by a clock that only this work moves."""

import os
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import Dataset

from tests.unit.trainer.user_code import Before, double_mlp, double_samples

CLOCK = SimpleNamespace(now=0.0)


def work(seconds: float, of_rank_1: float) -> None:
    """Let time pass, on rank 1 so much."""
    CLOCK.now += of_rank_1 if os.environ["RANK"] == "1" else seconds


class Works(nn.Module):
    """What comes in, scaled, after a while; so do gradients."""

    def __init__(self, seconds: float, of_rank_1: float) -> None:
        super().__init__()
        self.seconds, self.of_rank_1 = seconds, of_rank_1
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        work(self.seconds, self.of_rank_1)
        after = x.clone()
        if after.requires_grad:
            after.register_hook(lambda _: work(self.seconds, self.of_rank_1))
        return after * self.scale


class Working(nn.Sequential):
    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        return {"1": ColwiseParallel(), "4": RowwiseParallel()}


def working_model(seconds: float, of_rank_1: float) -> nn.Module:
    """A model whose first half takes time, and whose second half does."""
    first, second = double_mlp()[:2], double_mlp()[2:]
    return Working(Works(seconds, of_rank_1), *first, Works(seconds, of_rank_1), *second)


def working_samples(seconds: float, of_rank_1: float) -> tuple[Dataset, Dataset]:
    training, held_out = double_samples()
    return Before(training, lambda _: work(seconds, of_rank_1)), held_out
