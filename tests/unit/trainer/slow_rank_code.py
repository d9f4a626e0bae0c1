"""Models and data of which rank 1 works longer than others, by a clock that only this work moves."""

import os
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from tests.unit.trainer.user_code import Before, double_mlp, double_moe_gpt, double_samples

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


class Late(nn.Module):
    """What comes in. It has a buffer, and rank 0 is late after each update."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(1))
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        held = {self.weight}

        def after_update(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if os.environ["RANK"] == "0" and held & {
                one for group in optimizer.param_groups for one in group["params"]
            }:
                CLOCK.now += seconds

        register_optimizer_step_post_hook(after_update)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Working(nn.Sequential):
    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        return {"1": ColwiseParallel(), "4": RowwiseParallel()}


def working_model(seconds: float, of_rank_1: float) -> nn.Module:
    """A model whose first half takes time, and whose second half does."""
    first, second = double_mlp()[:2], double_mlp()[2:]
    return Working(Works(seconds, of_rank_1), *first, Works(seconds, of_rank_1), *second)


def late_model(seconds: float, of_rank_1: float, late: float) -> nn.Module:
    """A model with a buffer, of which rank 0 is late between steps."""
    return nn.Sequential(Late(late), *working_model(seconds, of_rank_1))


def working_samples(seconds: float, of_rank_1: float) -> tuple[Dataset, Dataset]:
    training, held_out = double_samples()
    return Before(training, lambda _: work(seconds, of_rank_1)), held_out


def working_gpt(seconds: float, of_rank_1: float, row: float = 0.0, **config: Any) -> nn.Module:
    """The built-in Gpt whose first block takes time, and whose experts do, by the tokens that they are given."""

    def after(_: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> Tensor:
        work(seconds, of_rank_1)
        if outputs.requires_grad:
            outputs.register_hook(lambda _: work(seconds, of_rank_1))
        return outputs

    def after_experts(_: nn.Module, inputs: tuple[Any, ...], outputs: Tensor) -> None:
        CLOCK.now += row * len(inputs[0])
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: work(row * len(gradient), row * len(gradient)))

    gpt = double_moe_gpt(**config)
    gpt.blocks[0].register_forward_hook(after)
    for block in gpt.blocks if row else ():
        block.feed_forward.experts.register_forward_hook(after_experts)
    return gpt
