"""How long each layer takes, measured on a sample: what `split: Time` makes equal."""

import time
from collections.abc import Sequence

from torch import Tensor, nn

from disttrain_trainer.parallel.untouched import Untouched
from disttrain_trainer.runtime.device import Device

_REPEATS = 3


def seconds_of_layers(layers: Sequence[nn.Module], inputs: Tensor, device: Device) -> list[float]:
    """Forward and backward time of each layer, the shortest of a few, for inputs [B, ...] of the first one.

    Leaves no gradients, and buffers and extra state as they were.
    """
    untouched = Untouched(layers)
    times: list[float] = []
    x = inputs
    for layer in layers:
        runs = [_run(layer, x, device) for _ in range(_REPEATS + 1)]
        # The first one allocates.
        times.append(min(seconds for seconds, _ in runs[1:]))
        x = runs[-1][1]
    untouched.put_back()
    for layer in layers:
        layer.zero_grad(set_to_none=True)
    return times


def _run(layer: nn.Module, inputs: Tensor, device: Device) -> tuple[float, Tensor]:
    own = inputs.detach().requires_grad_(inputs.is_floating_point())
    device.synchronize()
    begin = time.perf_counter()
    outputs = layer(own)
    if outputs.requires_grad:
        outputs.sum().backward()
    device.synchronize()
    return time.perf_counter() - begin, outputs.detach()
