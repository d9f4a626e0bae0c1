"""User code whose layers are not what they may look like, or come late, and data that draw their noise from NumPy."""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import Dataset, Subset

from tests.unit.trainer.user_code import double_gpt, double_moe_gpt, double_samples


def of_layers(function: str, **config: Any) -> dict[str, Any]:
    """Model or data from this file."""
    return {"entrypoint": f"tests.unit.trainer.user_layers:{function}", "config": config}


class Residual(nn.Sequential):
    """Looks like its layers in turn, and is not."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)  # type: ignore[no-any-return]


def residual() -> nn.Module:
    return Residual(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()


def exact_gpt(experts: bool = False, **config: Any) -> nn.Module:
    """A Gpt that computes in FP32 whatever the job's precision, so that nothing is rounded but by layers of its own.

    Without experts, each row of a feed-forward layer has one weight that is much larger than the others, and never
    counts: by its scale, the others keep a few bits in FP8.
    """
    if experts:
        return _exact(double_moe_gpt(**config).float())
    module = double_gpt(double=False, **config)
    with torch.no_grad():
        for block in module.blocks:
            block.feed_forward[0].bias[0] = -100.0
            block.feed_forward[2].weight[:, 0] = 2.0**12
    return _exact(module)


def exact_transformers(family: str, **config: Any) -> nn.Module:
    """As exact_gpt, of transformers."""
    from tests.unit.trainer.transformers_code import double_transformers

    return _exact(double_transformers(family, **config).float())


def _exact(module: nn.Module) -> nn.Module:
    module.forward = torch.autocast("cpu", enabled=False)(module.forward)  # type: ignore[method-assign]
    return module


class Fork(nn.Linear):
    """Two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return x, super().forward(x)


class Join(nn.Linear):
    """Takes two."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(both[0] + both[1])


def forked() -> nn.Module:
    return nn.Sequential(Fork(6, 6), Join(6, 6), nn.Linear(6, 3)).double()


class Shift(nn.Module):
    """Adds a parameter to its inputs once it has been called more than `waits` times in training."""

    def __init__(self, size: int, waits: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(size))
        self.register_buffer("calls", torch.zeros(()))
        self.waits = waits

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.shift if self.calls > self.waits else x


class Late(nn.Sequential):
    """6 numbers -> 5 classes in float64: one of its layers is used from some step on, another one never."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), Shift(5, waits=6), Shift(5, waits=10**9))
        self.double()

    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        return {"0": ColwiseParallel(), "2": RowwiseParallel()}


def late_layers() -> nn.Module:
    return Late()


class Remembering(nn.Module):
    """Scales by how often it was called in training, which it keeps beside its parameters, as quantised layers do."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.append(len(self.calls))
        return x * (1 + len(self.calls) / 50)

    def get_extra_state(self) -> Any:
        match self.form:
            case "number":
                return len(self.calls)
            case "bytes in a tensor":
                return torch.tensor(list(b"x" * len(self.calls)), dtype=torch.uint8)
            case "tensor":
                return torch.tensor(float(len(self.calls)))
        return {7: {"calls": list(self.calls)}, "pair": (torch.arange(3), None), "nothing": {}}

    def set_extra_state(self, state: Any) -> None:
        if self.form == "containers":
            assert type(state["pair"]) is tuple
            assert state["nothing"] == {}
            self.calls = state[7]["calls"]
        else:
            self.calls = list(range(len(state) if self.form == "bytes in a tensor" else int(state)))


def remembering(forms: list[str]) -> nn.Module:
    layers = [layer for form in forms for layer in (nn.Linear(6, 6), Remembering(form))]
    return nn.Sequential(*layers, nn.Linear(6, 5)).double()


class Arrays(Remembering):
    """Has extra state that no checkpoint is read with."""

    def get_extra_state(self) -> Any:
        return {"calls": np.arange(len(self.calls))}


def arrays() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), Arrays("array")).double()


class Odd(nn.Module):
    """Buffers of many formats and layouts, which every rank sets otherwise; an evaluation wants those of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.full((4, 3), -1.0, dtype=torch.float64)
        self.register_buffer("column", self.table[:, 1])
        self.register_buffer("turned", torch.zeros(2, 3).t())
        self.register_buffer("windows", torch.zeros(5).unfold(0, 3, 1))
        self.register_buffer("short", torch.zeros(3, dtype=torch.int16))
        self.register_buffer("wide", torch.zeros(3, dtype=torch.uint16), persistent=False)
        self.register_buffer("tiny", torch.zeros(3, dtype=torch.float8_e4m3fn))
        self.register_buffer("flags", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("phases", torch.zeros(3, dtype=torch.complex64).conj())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("none", torch.zeros(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        for name, buffer in self.named_buffers():
            if self.training:
                buffer.copy_(torch.full(buffer.shape, 1 - int(os.environ["RANK"])))
            elif not bool((buffer.to(torch.complex128) == 1).all()):
                raise ValueError(f"{name} is {buffer.tolist()}")
        if (self.table[:, ::2] != -1).any():
            raise ValueError(f"beside `column` is {self.table.tolist()}")
        return x


def odd_buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh(), Odd(), nn.Linear(6, 5).double())


def expanded_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5)).double()
    model[0].register_buffer("ids", torch.arange(5).expand(3, 5))
    return model


class Frozen(nn.Sequential):
    """Layers whose mode is set by a method of their own, as libraries freeze and merge what they have trained."""

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self[1].eval()
        return self


def frozen_norms(whole: bool = False) -> nn.Module:
    """A layer whose running statistics are not to move; `whole`: the model comes in evaluation mode."""
    norm, other = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    model = nn.Sequential(norm, nn.Linear(6, 6), nn.BatchNorm1d(6), Frozen(nn.Linear(6, 6), other), nn.Linear(6, 5))
    norm.eval()
    other.eval()
    return model.double().eval() if whole else model.double()


class Draws:
    """A callback that draws when it is built, more on every rank than on the one before."""

    def __init__(self) -> None:
        for _ in range(1 + int(os.environ["RANK"])):
            random.random(), np.random.random(), torch.rand(())

    def on_end(self, moment: Any) -> None:
        """Nothing."""


def drawn_split(folder: str, how: str) -> tuple[Dataset, Dataset]:
    """A split of `double_samples` that is drawn; says in a file of this rank what it holds out."""
    samples, _ = double_samples()
    match how:
        case "Python":
            order = random.sample(range(50), 50)
        case "NumPy":
            order = np.random.permutation(50).tolist()
        case _:
            order = torch.randperm(50).tolist()
    with Path(folder, f"{how}-{os.environ['RANK']}").open("a") as file:
        file.write(f"{sorted(order[40:])}\n")
    return Subset(samples, order[:40]), Subset(samples, order[40:])


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise from Python's and NumPy's generators, as augmentation often draws it."""

    def __init__(self, inner: Dataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.inner[index]
        return inputs + torch.from_numpy(np.random.normal(size=inputs.shape)) * random.random(), target


def noisy_samples() -> tuple[Dataset, Dataset]:
    training, held_out = double_samples()
    return Noisy(training), held_out
