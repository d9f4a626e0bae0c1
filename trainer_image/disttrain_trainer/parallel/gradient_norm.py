"""The 2-norm of a gradient that lies in pieces on many ranks, and clipping by it."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World


def total_norm(parameters: Iterable[nn.Parameter], world: World) -> Tensor:
    """2-norm over all elements of all gradients, each counted once, alike on every rank."""
    return total_norm_later(parameters, world)()


def total_norm_later(
    parameters: Iterable[nn.Parameter], world: World, copies: Mapping[nn.Parameter, int] | None = None
) -> Callable[[], Tensor]:
    """Start to compute the norm and return a function that waits for it; the gradients may change meanwhile.

    Where no gradient is cut, every rank has all of it and nothing is sent.
    copies: how many pipeline indices hold a parameter, where it is not one.
    """
    parameters = list(parameters)
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    gradients = [gradient for _, gradient in held]
    pipeline = world.mesh.pipeline
    if pipeline == 1 and not any(isinstance(gradient, DTensor) for gradient in gradients):
        whole = torch.nn.utils.get_total_norm([local_values(gradient) for gradient in gradients])
        return lambda: whole
    device = world.device.torch
    # Of the parameters: a rank without any gradient sends a number as wide as the others do.
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
    work = dist.all_reduce(total, group=world.control, async_op=True)

    def norm() -> Tensor:
        if work is not None:
            work.wait()
        return total.sqrt()

    return norm


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
