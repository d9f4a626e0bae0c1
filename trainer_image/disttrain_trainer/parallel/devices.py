"""One process, several devices: copies of the model that share a batch, or one model whose layers are spread.

Replicate is what torch.nn.DataParallel does: parameters are sent to every device in each forward pass, the batch is
scattered, the copies compute side by side in threads, outputs are gathered; gradients flow back the same way and are
summed on the first device. Place is naive model parallelism: each device holds some of the layers, activations move
on, and one device computes at a time. Both also run on CPUs, as logical devices, which torch's own does not.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_api.parallelism import DeviceMode, Parallelism
from disttrain_trainer.parallel.layers import composes, layers_of, one_tensor, place
from disttrain_trainer.parallel.untouched import with_extra_state
from disttrain_trainer.runtime.device import current
from disttrain_trainer.runtime.errors import InvalidConfiguration, one_line
from disttrain_trainer.runtime.mesh import World

Around = Callable[[], AbstractContextManager[object]]


def spread_over_devices(module: nn.Module, parallelism: Parallelism, world: World, around: Around) -> nn.Module:
    """The module as it is called, over the devices of this process; itself where there is one.

    around: what each device computes a forward pass in, besides the caller's autocast.
    Raises InvalidConfiguration where layers are to be placed and the model does not say what they are, and where it
    cannot be copied.
    """
    count = parallelism.devices_per_process or 1
    if count == 1:
        return module
    devices = world.device.neighbours(count)
    if parallelism.device_mode is DeviceMode.PLACE:
        return Placed(module, devices)
    return Replicated(module, devices, around)


class Replicated(nn.Module):
    """[B, ...] -> [B, ...], each device computing a part of the batch. Parameters stay those of `module`."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device], around: Around) -> None:
        super().__init__()
        self.module, self.devices, self._around = module, tuple(devices), around
        self._copies = tuple(_copy_of(module) for _ in devices)
        self._threads = ThreadPoolExecutor(len(self.devices))

    def forward(self, inputs: Tensor) -> Tensor:
        # A batch smaller than the number of devices leaves some without work.
        parts = inputs.tensor_split(min(len(self.devices), len(inputs)))
        self._hand_out(len(parts))
        grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled(inputs.device.type)
        number_format = torch.get_autocast_dtype(inputs.device.type)

        def compute(copy: nn.Module, part: Tensor, device: torch.device) -> Tensor:
            # All of them are settings of a thread.
            with (
                current(device),
                torch.set_grad_enabled(grad),
                torch.autocast(device.type, number_format, enabled=autocast),
                self._around(),
            ):
                return one_tensor(copy, copy(part.to(device)))

        outputs = list(self._threads.map(compute, self._copies, parts, self.devices))
        self._exchange_extra_state(self._copies[:1], back=True)
        return torch.cat([output.to(inputs.device) for output in outputs])

    def _hand_out(self, count: int) -> None:
        """Give so many copies the parameters and buffers as they are now; they keep them for the backward pass.

        Buffers that a forward pass writes (running means) are kept of the first copy alone, as torch does it; extra
        state likewise.
        """
        self._exchange_extra_state(self._copies[:count])
        sent = {id(value): _Send.apply(value, self.devices[:count]) for value in self.module.parameters()}
        for number, (copy, device) in enumerate(zip(self._copies[:count], self.devices, strict=False)):
            for original, own in zip(self.module.modules(), copy.modules(), strict=True):
                own.training = original.training
                for name, value in original.named_parameters(recurse=False, remove_duplicate=False):
                    own._parameters[name] = sent[id(value)][number]
                for name, buffer in original.named_buffers(recurse=False, remove_duplicate=False):
                    own._buffers[name] = buffer.to(device, copy=number > 0)

    def _exchange_extra_state(self, copies: Sequence[nn.Module], *, back: bool = False) -> None:
        """Give copies the extra state of the module; `back`: the other way round."""
        for copy in copies:
            for original, own in zip(with_extra_state([self.module]), with_extra_state([copy]), strict=True):
                source, target = (own, original) if back else (original, own)
                target.set_extra_state(deepcopy(source.get_extra_state()))


class _Send(torch.autograd.Function):
    """A parameter on several devices. Its gradient is the sum of theirs, always in their order: bits depend on it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, devices: Sequence[torch.device]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.device = value.device
        return tuple(value.view_as(value) if device == value.device else value.to(device) for device in devices)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None]:
        there = [gradient.to(ctx.device) for gradient in gradients if gradient is not None]
        return (sum(there[1:], there[0]) if there else None), None


def _copy_of(module: nn.Module) -> nn.Module:
    """Modules of their own, as threads must not give each other's parameters to the same ones; no memory for values.

    Raises InvalidConfiguration where the model holds what cannot be copied.
    """
    shared: dict[int, Any] = {id(value): value for value in (*module.parameters(), *module.buffers())}
    try:
        copy = deepcopy(module, shared)
    except (TypeError, RuntimeError) as error:
        raise InvalidConfiguration(
            f"`parallelism.deviceMode` Replicate: {type(module).__name__} cannot be copied ({one_line(error)}); keep"
            " out of it what is neither a module nor a tensor, or run a process per device"
        ) from error
    for original, own in zip(module.modules(), copy.modules(), strict=True):
        # Not copied by torch.
        if original._compiled_call_impl is not None:
            own.compile()
    return copy


class Placed(nn.Module):
    """The layers of `module` in turn, each on its own device; contiguous parts of about as many parameters each."""

    def __init__(self, module: nn.Module, devices: Sequence[torch.device]) -> None:
        super().__init__()
        layers = layers_of(module)
        if not composes(module) or len(layers) < len(devices):
            raise InvalidConfiguration(
                f"`parallelism.deviceMode` Place: {type(module).__name__} has {len(layers)} layers that can be placed, "
                f"`devicesPerProcess` is {len(devices)}: make it an nn.Sequential without a forward of its own, or "
                "give it a method `layers` that returns the modules whose composition it is"
            )
        self.module = module
        self.places = place([sum(p.numel() for p in layer.parameters()) for layer in layers], len(devices))
        self._steps = [(layer, devices[at]) for layer, at in zip(layers, self.places, strict=True)]
        for layer, device in self._steps:
            layer.to(device)

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for layer, device in self._steps:
            x = one_tensor(layer, layer(x.to(device)))
        return x.to(inputs.device)
