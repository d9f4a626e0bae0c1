"""The 2-norm of a gradient that lies in pieces on many ranks, and clipping by it."""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World


class GradientNorm:
    """The 2-norm over all elements of a gradient, each counted once. A call returns it, alike on every rank."""

    def __init__(self, norm: Tensor | None = None, part: Tensor | None = None, world: World | None = None) -> None:
        """norm: where it is known; else part: what this rank adds to its square, and the world to sum that over."""
        self._norm, self.part, self._world = norm, part, world

    def __call__(self) -> Tensor:
        """Return the norm; all ranks call it together where a part of it is still to be summed."""
        if self.part is not None:
            assert self._world is not None
            dist.all_reduce(self.part, group=self._world.control)
            self.settle(self.part)
        assert self._norm is not None
        return self._norm

    def settle(self, square: Tensor) -> None:
        """Take the sum of all ranks' parts, which somebody else has computed."""
        assert self.part is not None
        self._norm, self.part = square.to(self.part).sqrt(), None


def total_norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:
    """2-norm over all elements of all gradients, each counted once, alike on every rank."""
    return norm_of_gradients(parameters, world)()


def norm_of_gradients(
    parameters: Iterable[nn.Parameter], world: World, copies: Mapping[nn.Parameter, int] | None = None
) -> GradientNorm:
    """Return the norm of the gradients as they are now; nothing has been sent yet.

    Where no gradient is cut, every rank has all of it and nothing will be.
    copies: how many pipeline indices hold a parameter, where it is not one.
    """
    parameters = list(parameters)
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for _, gradient in held]
    pipeline = world.mesh.pipeline
    if pipeline == 1 and not any(isinstance(gradient, DTensor) for gradient in gradients):
        return GradientNorm(torch.nn.utils.get_total_norm([local_values(gradient) for gradient in gradients]))
    device = world.device.torch
    # The parameters say how wide: a rank without any gradient sends a number as wide as the others do.
    total = torch.zeros((), dtype=_widest(parameters), device=device)
    parts: dict[float, list[Tensor]] = {}
    for parameter, gradient in held:
        # Ranks that hold this piece: those of the mesh / pieces, on each pipeline index that has the parameter.
        holders = world.size / pipeline / _parts(gradient) * (copies or {}).get(parameter, 1)
        parts.setdefault(holders, []).append(local_values(gradient))
    for holders, pieces in parts.items():
        # At once: an operation for each of hundreds of pieces would take longer than the norms.
        norms = torch._foreach_norm(pieces, 2, dtype=total.dtype)
        total += torch.stack([norm.to(device) for norm in norms]).square().sum() / holders
    # Every element now counts as often as ranks hold it, in equal parts: the sum over the world counts it once.
    return GradientNorm(part=total, world=world)


def clip(parameters: Iterable[nn.Parameter], norm: Tensor, maximum: float) -> None:
    """Scale all gradients down to `maximum` where their norm is above it (as torch's clip_grads_with_norm_)."""
    factor = torch.clamp(maximum / (norm + 1e-6), max=1.0)
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            own = local_values(parameter.grad)
            alike.setdefault((own.device, own.dtype), []).append(own)
    # At once: hundreds of gradients would be hundreds of kernels on a GPU.
    for (device, number_format), gradients in alike.items():
        torch._foreach_mul_(gradients, factor.to(device, number_format))


def local_values(gradient: Tensor) -> Tensor:
    """Return this rank's part of the gradient; for a coalesced sparse one its values."""
    return gradient.values() if gradient.is_sparse else local_part(gradient)


def _parts(gradient: Tensor) -> int:
    """Into how many different pieces it is cut; ranks that hold the same piece share its square equally."""
    if not isinstance(gradient, DTensor):
        return 1
    parts = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        if not isinstance(placement, Replicate):
            parts *= size
    return parts


def _widest(tensors: Iterable[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype is torch.float64 for tensor in tensors) else torch.float32
