"""Models and data of ranks that are lost in their first life, at a known place."""

import os
import signal
from collections import Counter
from itertools import count
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import Dataset

from disttrain_api.names import Env
from disttrain_trainer.survivors import survivor
from tests.unit.trainer.user_code import Before, double_gpt, double_samples, wide_mlp
from tests.waiting import until

NEVER = 1_000_000
LOST = "Connection closed by peer [127.0.0.1]:29500"
"""What gloo says."""


def _is(rank: int) -> bool:
    return os.environ["RANK"] == str(rank) and os.environ[Env.GENERATION] == "0"


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _dying(module: nn.Module, rank: int, after: int, by: signal.Signals = signal.SIGKILL) -> nn.Module:
    """The module, which kills this rank in its forward pass once it has computed so many of training."""
    calls = count(1)

    def before(inner: nn.Module, _: object) -> None:
        if inner.training and next(calls) > after and _is(rank):
            os.kill(os.getpid(), by)

    module.register_forward_pre_hook(before)
    return module


def stopping_mlp(rank: int, after: int) -> nn.Module:
    """The next one, whose rank does not die but stands still, as if its node had died: it closes no connection."""
    return _dying(wide_mlp(), rank, after, signal.SIGSTOP)


def dropout_mlp(rank: int = 0, after: int = NEVER) -> nn.Module:
    """Dropout, and several buckets of DDP."""
    return _dying(wide_mlp(), rank, after)


class Normed(nn.Sequential):
    """Buffers that change in each forward pass, and one that never does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5))
        self.register_buffer("unused", torch.zeros(0))


def normed_mlp(rank: int = 0, after: int = NEVER) -> nn.Module:
    return _dying(Normed().double(), rank, after)


def scarce_mlp(rank: int, after: int) -> nn.Module:
    """The first, in a pod without memory to spare."""
    survivor.memory_available = lambda: 0  # type: ignore[assignment]
    return dropout_mlp(rank, after)


def torn_mlp(step: int) -> nn.Module:
    """While both ranks do their update of a step, rank 1 is killed, and rank 0 finds a peer lost."""
    calls = count(1)

    def updated(*_: object) -> None:
        if next(calls) != step:
            return
        if _is(1):
            _die()
        if _is(0):
            raise RuntimeError(LOST)

    register_optimizer_step_post_hook(updated)
    return dropout_mlp()


def layered_gpt(ranks: tuple[int, ...] = (), step: int = NEVER, where: str = "", **config: object) -> nn.Module:
    """Dropout, and layers that can be cut in every way. It kills these ranks, once all of them are there, in the
    forward or backward pass or the update of a step."""
    module, dies = double_gpt(dropout=0.1, **config), any(map(_is, ranks))
    done = 0

    def die(*_: object) -> None:
        if dies and done + 1 == step:
            there = [Path(os.environ[Env.REPORT_DIR], f"dies-{rank}") for rank in ranks]
            there[list(ranks).index(int(os.environ["RANK"]))].touch()
            until(lambda: all(file.exists() for file in there), "the other ranks are there")
            _die()

    def end_step(*_: object) -> None:
        nonlocal done
        done += 1

    def before_backward(_block: nn.Module, _inputs: object, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(die)

    register_optimizer_step_post_hook(end_step)
    if where == "update":
        register_optimizer_step_pre_hook(die)
    for block in module.blocks:
        if where == "forward":
            block.register_forward_pre_hook(die)
        elif where == "backward":
            block.register_forward_hook(before_backward)
    return module


def samples_until(rank: int = 0, after: int = NEVER, evaluations: int = NEVER) -> tuple[Dataset, Dataset]:
    """Samples that kill this rank when it reads more than so many of them, or evaluates once more than so often."""
    calls, evaluated = count(1), Counter[int]()

    def act(_: int) -> None:
        if next(calls) > after and _is(rank):
            _die()

    def act_held_out(index: int) -> None:
        evaluated[index] += 1
        if evaluated[index] > evaluations and _is(rank):
            _die()

    training, held_out = double_samples()
    return Before(training, act), Before(held_out, act_held_out)


class Counting:
    """A callback that keeps state of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step(self, moment: object) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]
