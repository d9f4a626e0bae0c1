"""Number formats: parameters keep their own, the forward pass runs under autocast, FP16 gradients are scaled."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from disttrain_api.training import Precision, Training
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.sharded import is_sharded

_FORMATS = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


@dataclass(frozen=True)
class MixedPrecision:
    """How a step computes. `scaler` passes everything through unless the format is FP16."""

    device: torch.device
    format: torch.dtype | None
    scaler: torch.amp.GradScaler

    def autocast(self) -> AbstractContextManager[object]:
        """The forward pass and the loss run inside."""
        if self.format is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.format)

    def backward(self, loss: Tensor) -> None:
        """Backward pass of the loss, scaled up for FP16, whose small gradients would vanish."""
        self.scaler.scale(loss).backward()

    def scaled_one(self) -> Tensor:
        """What `backward` multiplies the loss by: 1, except with FP16."""
        return self.scaler.scale(torch.ones((), device=self.device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the gradients their true size."""
        self.scaler.unscale_(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, except where FP16 gradients overflowed; then the scale falls instead."""
        self.scaler.step(optimizer)
        self.scaler.update()

    @property
    def scales(self) -> bool:
        """Whether gradients may overflow and be skipped."""
        return self.scaler.is_enabled()


def build_precision(training: Training, world: World) -> MixedPrecision:
    """FP32: no autocast. TF32: none either, but GPUs may round the factors of FP32 products to 10 bits of mantissa, for
    which they are several times faster; a setting of the whole process. BF16: autocast, but where FSDP2 gathers the
    parameters in that format. FP16: autocast and a loss scaler.
    """
    precision, device = training.precision, world.device.torch
    torch.set_float32_matmul_precision("high" if precision is Precision.TF32 else "highest")
    scaler = torch.amp.GradScaler(device.type, enabled=precision is Precision.FP16)
    number_format = None if is_sharded(training, world) else _FORMATS.get(precision)
    return MixedPrecision(device, number_format, scaler)
