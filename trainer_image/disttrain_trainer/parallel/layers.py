"""The layers of a model: what is gathered, recomputed and compiled as a whole, or laid onto devices and stages."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from disttrain_trainer.parallel.activations import compile_inside
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import InvalidConfiguration


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The model's own `layers()`, else the elements of its outermost nn.Sequential and nn.ModuleList; maybe none."""
    layers = offered(module, "layers")
    if layers is not None and not isinstance(layers, nn.Module):
        return list(layers())
    if isinstance(module, nn.Sequential | nn.ModuleList):
        return list(module.children())
    return [layer for child in module.children() for layer in layers_of(child)]


def composes(module: nn.Module) -> bool:
    """Whether the model's forward pass is that of its layers in turn."""
    layers = offered(module, "layers")
    in_turn = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return in_turn or (layers is not None and not isinstance(layers, nn.Module))


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer, in place, but those that are themselves cut over a tensor group: a table, a projection or a
    normalisation, in which there is little to fuse.

    torch 2.13 compiles no cut table, and a cut projection that is compiled alone gives gradients that are wrong by as
    much as they are large. Where a compiled layer gets a tensor that is still being received, its backward pass fails.
    """
    for layer in layers:
        if any(isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)):
            layer.register_forward_hook(lambda _layer, _inputs, output: _received(output))
        # A graph with DTensors holds their meshes, which torch does not keep for a graph that is computed anew in it.
        elif not (any(isinstance(one, DTensor) for one in layer.parameters()) and compile_inside(layer)):
            layer.compile()


def _received(output: Tensor) -> Tensor:
    waited: Tensor = _Received.apply(output) if isinstance(output, AsyncCollectiveTensor) else output
    return waited


class _Received(torch.autograd.Function):
    """Waits for a tensor that is being received from other ranks."""

    @staticmethod
    def forward(ctx: Any, arriving: AsyncCollectiveTensor) -> Tensor:
        return arriving.wait()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def one_tensor(layer: nn.Module, outputs: object) -> Tensor:
    """Return the output of a layer. Raises InvalidConfiguration if it is not one tensor."""
    if isinstance(outputs, Tensor):
        return outputs
    raise InvalidConfiguration(
        f"`training.model`: the layer {type(layer).__name__} returns a {type(outputs).__name__}, but what lies between"
        " stages and devices is one tensor: put layers that hand on more together into one module"
    )


def place(sizes: Sequence[float], devices: int) -> list[int]:
    """The device of each layer: ascending, every device at least once, the largest sum of sizes as small as possible.

    sizes: of each layer, at least as many as `devices`. Dynamic programming over (layers left, devices left).
    """
    count = len(sizes)
    prefix = [0.0]
    for size in sizes:
        prefix.append(prefix[-1] + size)
    # best[d][n]: the smallest largest part of the first n layers on d devices, and where the last part begins.
    best = [[(float("inf"), 0)] * (count + 1) for _ in range(devices + 1)]
    best[0][0] = (0.0, 0)
    for device in range(1, devices + 1):
        for end in range(device, count + 1):
            best[device][end] = min(
                (max(best[device - 1][begin][0], prefix[end] - prefix[begin]), begin)
                for begin in range(device - 1, end)
            )
    places = [0] * count
    end = count
    for device in range(devices, 0, -1):
        begin = best[device][end][1]
        places[begin:end] = [device - 1] * (end - begin)
        end = begin
    return places
