"""Data of a user that draw from all generators, fail while they are read, or are spoilt; a loss that these spoil."""

import os
import random
import signal
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset, get_worker_info

from disttrain_trainer.data.sampler import permute
from tests.unit.trainer.stream_code import Rows
from tests.unit.trainer.user_code import WithLoss, double_mlp, double_samples


class Drawn(Dataset):
    """Samples with noise on top, some with another class, whose draws no rank may see otherwise than its peers."""

    def __init__(self, samples: Dataset) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, target = self.samples[index]
        noise = torch.randn(6, dtype=torch.float64) + torch.from_numpy(np.random.normal(size=6))
        return x + 0.1 * noise, target if random.random() < 0.7 else torch.tensor(random.randrange(5))


class UnpicklableError(ValueError):
    """An error that does not travel."""

    def __init__(self, message: str, hook: Any) -> None:
        super().__init__(message)
        self.hook = hook


class Failing(Drawn):
    """Samples of which one cannot be read."""

    def __init__(self, samples: Dataset, how: str) -> None:
        super().__init__(samples)
        self.how = how

    def __getitem__(self, index: int) -> Any:
        x, target = super().__getitem__(index)
        if index != 7:
            return x, target
        if self.how == "raises":
            raise LookupError("sample 7 is nowhere")
        if self.how == "raises what does not travel":
            raise UnpicklableError("sample 7 is nowhere", lambda: None)
        if self.how == "leaves":
            raise SystemExit(9)
        if self.how == "is killed" and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.ones(3), target


def drawn() -> tuple[Dataset, Dataset]:
    training, held_out = double_samples()
    return Drawn(training), Drawn(held_out)


def failing(how: str) -> tuple[Dataset, None]:
    return Failing(double_samples()[0], how), None


def spoilt_samples(factor: float | str, of_all: bool = False) -> tuple[Dataset, Dataset]:
    """`double_samples`, the inputs of one of them, or of all, multiplied by a number."""
    training, held_out = double_samples()
    inputs, targets = (tensor.clone() for tensor in training.tensors)
    inputs[slice(None) if of_all else 30] *= float(factor)
    return TensorDataset(inputs, targets), held_out


def spoilt_floats() -> tuple[Dataset, None]:
    """The training samples of `spoilt_samples` in float32, one of them without a number."""
    inputs, targets = spoilt_samples("nan")[0].tensors
    return TensorDataset(inputs.float(), targets), None


STEPS_OF_EPOCH, PER_STEP = 10, 24


def _by_step(
    first: int, last: int, passed_over: tuple[int, int] | None, factor: float | str = "nan"
) -> tuple[Tensor, Tensor]:
    """The samples of ten steps in their order, the inputs of steps `first` to `last` multiplied by a number.

    passed_over: (after this step, samples of so many steps): the order of who does not take these.
    """
    inputs, targets = (tensor.clone() for tensor in double_samples(STEPS_OF_EPOCH * PER_STEP)[0].tensors)
    inputs[(first - 1) * PER_STEP : last * PER_STEP] *= float(factor)
    if passed_over is not None:
        begin, count = (steps * PER_STEP for steps in passed_over)
        inputs, targets = (torch.cat([tensor[:begin], tensor[begin + count :]]) for tensor in (inputs, targets))
        inputs, targets = (torch.cat([tensor, tensor[:count]]) for tensor in (inputs, targets))
    return inputs, targets


def spoilt_apart(steps: list[int]) -> tuple[Dataset, Dataset]:
    """As `spoilt_steps`, the inputs of each of these steps."""
    ordered = _by_step(1, 0, None)
    for step in steps:
        ordered[0][(step - 1) * PER_STEP : step * PER_STEP] = torch.nan
    return _placed(ordered)


def spoilt_half(step: int, *, copied: bool = False) -> tuple[Dataset, Dataset]:
    """As `spoilt_apart`, the first half of one step; `copied`: it is the second half once more."""
    inputs, targets = _by_step(1, 0, None)
    begin = (step - 1) * PER_STEP
    middle, end = begin + PER_STEP // 2, begin + PER_STEP
    if copied:
        inputs[begin:middle], targets[begin:middle] = inputs[middle:end], targets[middle:end]
    else:
        inputs[begin:middle] = torch.nan
    return _placed((inputs, targets))


def spoilt_on(rank: int) -> tuple[Dataset, Dataset]:
    """`double_samples`, of which one rank of the job finds none that is a number."""
    return spoilt_samples("nan" if int(os.environ["RANK"]) == rank else 1.0, of_all=True)


def spoilt_steps(
    first: int, last: int, passed_over: tuple[int, int] | None = None, factor: float | str = "nan"
) -> tuple[Dataset, Dataset]:
    """See `_by_step`, put where the sampler of seed 0 takes them."""
    return _placed(_by_step(first, last, passed_over, factor))


def _placed(ordered: tuple[Tensor, Tensor]) -> tuple[Dataset, Dataset]:
    places = torch.from_numpy(permute(np.arange(len(ordered[0])), len(ordered[0]), 0, 0))
    inputs, targets = (torch.empty_like(tensor) for tensor in ordered)
    inputs[places], targets[places] = ordered
    return TensorDataset(inputs, targets), double_samples()[1]


def spoilt_rows(first: int, last: int, passed_over: tuple[int, int] | None = None) -> tuple[Rows, Dataset]:
    """The same, iterated."""
    return Rows(list(zip(*_by_step(first, last, passed_over), strict=True))), double_samples()[1]


class _Spoiling(torch.autograd.Function):
    """The identity, whose gradient is not finite where an input is far out."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        ctx.far = bool((inputs.abs() > 20).any())
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.full_like(gradient, torch.nan) if ctx.far else gradient


class Spoiling(nn.Module):
    """See `_Spoiling`."""

    def forward(self, inputs: Tensor) -> Tensor:
        return _Spoiling.apply(inputs)


def spoiling_layers() -> nn.Sequential:
    """Four linear layers; behind the second one gradients are spoilt."""
    sizes = [6, 6, 6, 6, 5]
    first, second, *rest = [nn.Linear(*pair, dtype=torch.float64) for pair in pairwise(sizes)]
    return nn.Sequential(first, nn.Sequential(second, Spoiling()), *rest)


class InfiniteLoss(WithLoss):
    """The loss of a sample whose inputs are far out is infinite, and its gradient is that of cross-entropy."""

    def forward(self, inputs: Tensor) -> Tensor:
        self.far = inputs.abs().amax(1) > 20
        return super().forward(inputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().loss(outputs, targets) + torch.where(self.far, torch.inf, 0.0)


def infinite_loss_mlp() -> InfiniteLoss:
    return InfiniteLoss(*double_mlp())


class InfiniteGradient(nn.Sequential):
    """A linear layer of FP32, and a parameter whose gradient is infinite though the loss is not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5))
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.zero.sqrt()


def half_frozen() -> nn.Module:
    """`double_mlp` whose first layer is not trained."""
    model = double_mlp()
    model[0].requires_grad_(False)
    return model
