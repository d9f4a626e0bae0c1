"""One process, several devices: copies of the model that share a batch, or one model whose layers are spread.

Replicate is what torch.nn.DataParallel does: parameters are sent to every device in each forward pass, the batch is
scattered, the copies compute side by side in threads, outputs are gathered; gradients flow back the same way and are
summed on the first device. Place is naive model parallelism: each device holds some of the layers, activations move
on, and one device computes at a time. Both also run on CPUs, as logical devices, which torch's own does not.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.func import functional_call

from disttrain_api.parallelism import DeviceMode, Parallelism
from disttrain_trainer.errors import InvalidConfiguration
from disttrain_trainer.mesh import World
from disttrain_trainer.parallel.units import composes, layers_of, place


def spread_over_devices(module: nn.Module, parallelism: Parallelism, world: World) -> nn.Module:
    """The module as it is called, over the devices of this process; itself where there is one.

    Raises InvalidConfiguration where layers are to be placed and the model does not say what they are.
    """
    count = parallelism.devices_per_process or 1
    if count == 1:
        return module
    devices = world.device.neighbours(count)
    if parallelism.device_mode is DeviceMode.PLACE:
        return Placed(module, devices)
    return Replicated(module, devices)


class Replicated(nn.Module):
    """[B, ...] -> [B, ...], each device computing a part of the batch. Parameters stay those of `module`."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.module, self.devices = module, tuple(devices)
        self._threads = ThreadPoolExecutor(len(self.devices))

    def forward(self, inputs: Tensor) -> Tensor:
        # A batch smaller than the number of devices leaves some without work.
        parts = inputs.tensor_split(min(len(self.devices), len(inputs)))
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(inputs.device.type)
        number_format = torch.get_autocast_dtype(inputs.device.type)

        def compute(number: int, part: Tensor, device: torch.device) -> Tensor:
            # Both are settings of a thread.
            with torch.set_grad_enabled(grad), torch.autocast(device.type, number_format, enabled=autocast):
                return functional_call(self.module, self._copies(device, first=number == 0), part.to(device))

        outputs = self._threads.map(compute, range(len(parts)), parts, self.devices)
        return torch.cat([output.to(inputs.device) for output in outputs])

    def _copies(self, device: torch.device, *, first: bool) -> dict[str, Tensor]:
        """Every parameter and buffer on the device; `to` is differentiable, so gradients come back to the original.

        Buffers that a forward pass writes (running means) are kept of the first copy alone, as torch does it.
        """
        parameters = {name: value.to(device) for name, value in self.module.named_parameters()}
        return parameters | {name: value.to(device, copy=not first) for name, value in self.module.named_buffers()}


class Placed(nn.Module):
    """The layers of `module` in turn, each on its own device; contiguous parts of about as many parameters each."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__()
        layers = layers_of(module)
        if not composes(module) or len(layers) < len(devices):
            raise InvalidConfiguration(
                f"`parallelism.deviceMode` Place: {type(module).__name__} has {len(layers)} layers that can be placed, "
                f"`devicesPerProcess` is {len(devices)}: make it an nn.Sequential, or give it a method `layers` that "
                "returns the modules whose composition it is"
            )
        self.module = module
        self.places = place([sum(p.numel() for p in layer.parameters()) for layer in layers], len(devices))
        self._steps = [(layer, devices[at]) for layer, at in zip(layers, self.places, strict=True)]
        for layer, device in self._steps:
            layer.to(device)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for layer, device in self._steps:
            x = layer(x.to(device))
        return x.to(inputs.device)
