"""Number formats: parameters keep their own, the forward pass runs under autocast, FP16 gradients are scaled."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from disttrain_api.compute import Precision
from disttrain_api.training import Training
from disttrain_trainer.optim.loss_scale import LossScaler
from disttrain_trainer.parallel.sharded import HALVES, is_sharded
from disttrain_trainer.runtime.mesh import World


@dataclass(frozen=True)
class MixedPrecision:
    """How a step computes; with FP16 it has a scaler."""

    device: torch.device
    format: torch.dtype | None
    scaler: LossScaler | None = None

    def autocast(self) -> AbstractContextManager[object]:
        """The forward pass and the loss run inside."""
        if self.format is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.format)

    def backward(self, loss: Tensor) -> None:
        """Backward pass of the loss, scaled up for FP16, whose small gradients would vanish."""
        (loss if self.scaler is None else loss * self.scale).backward()

    def scaled_one(self) -> Tensor:
        """`scale` on the device."""
        return torch.full((), self.scale, device=self.device)

    def unscale(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give the gradients their true size."""
        if self.scaler is not None:
            self.scaler.unscale(parameters)

    def update(self, optimizer: torch.optim.Optimizer, norm: Callable[[], Tensor] | None) -> None:
        """Step the optimizer, except where FP16 gradients overflowed, as their 2-norm says, which is needed then."""
        if self.scaler is None:
            optimizer.step()
        else:
            assert norm is not None
            self.scaler.step(optimizer, float(norm()))

    @property
    def may_overflow(self) -> bool:
        """Whether no update, and a lower scale, is all that a gradient that is not finite leads to."""
        return self.scaler is not None and self.scaler.may_fall

    @property
    def scale(self) -> float:
        """The loss scale: 1, except with FP16."""
        return 1.0 if self.scaler is None else self.scaler.scale


def build_precision(training: Training, world: World) -> MixedPrecision:
    """FP32: no autocast. TF32: none either, but GPUs may round the factors of FP32 products to 10 bits of mantissa, for
    which they are several times faster; a setting of the whole process. BF16 and FP16: autocast, but where FSDP2
    gathers the parameters in that format; FP16 with a loss scaler.
    """
    precision, device = training.precision, world.device.torch
    torch.set_float32_matmul_precision("high" if precision is Precision.TF32 else "highest")
    number_format = None if is_sharded(training, world) else HALVES.get(precision)
    return MixedPrecision(device, number_format, LossScaler() if precision is Precision.FP16 else None)
