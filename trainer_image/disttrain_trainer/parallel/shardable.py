"""Checks of a model before FSDP2 shards it: FSDP2 itself would fail in the first step without naming the cause."""

from collections import Counter
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from disttrain_trainer.parallel.average import average
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World


def called(units: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the units; in place of containers (nn.ModuleList, nn.ModuleDict), which are never called, their
    children."""
    for unit in units:
        if isinstance(unit, nn.ModuleList | nn.ModuleDict) and type(unit).forward is nn.Module.forward:
            yield from called(unit.children())
        else:
            yield unit


@contextmanager
def naming_containers(unit: list[nn.Module]) -> Iterator[None]:
    """Raise InvalidConfiguration for a unit with a container which torch does not shard.

    torch 2.11 cuts none, 2.13 those that have a forward of their own; `called` has left none of the others.
    """
    try:
        yield
    except ValueError as error:
        found = next((one for one in unit if isinstance(one, nn.ModuleList | nn.ModuleDict)), None)
        if found is None:
            raise
        kind = type(found).__name__
        container = "nn.ModuleList" if isinstance(found, nn.ModuleList) else "nn.ModuleDict"
        raise InvalidConfiguration(
            f"`training.model`: torch {torch.__version__} cannot cut {kind}, an {container} with a forward of its own, "
            f"over shards; torch 2.13 can: use an image that has it, or make {kind} an nn.Module with the {container} "
            "as an attribute"
        ) from error


def make_contiguous(module: nn.Module) -> None:
    """Lay the numbers of each parameter out in order, in place; they may be transposed, or have channels last."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def whole_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that cannot be sharded: a single number without a dimension, or none at all. Every rank
    holds them."""
    return {one for one in module.parameters() if not isinstance(one, DTensor) and (one.dim() == 0 or one.numel() == 0)}


def without_tied(units: list[nn.Module], whole: Set[nn.Parameter]) -> Iterator[nn.Module]:
    """A parameter that two units share can be gathered by neither alone: it is left to the root."""
    cut = [[parameter for parameter in unit.parameters() if parameter not in whole] for unit in units]
    owners = Counter(parameter for parameters in cut for parameter in parameters)
    for unit, parameters in zip(units, cut, strict=True):
        if parameters and all(owners[parameter] == 1 for parameter in parameters):
            yield unit


def joined(units: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield units that are called in turn; those that have vectors alone, as a normalisation, with the one after them.

    Each is gathered and reduced by messages of its own, which for some hundred numbers is most of their cost.
    """
    small: list[nn.Module] = []
    for unit in units:
        if small and len({parameter.dtype for one in (*small, unit) for parameter in one.parameters()}) > 1:
            yield small
            small = []
        small.append(unit)
        if any(parameter.dim() > 1 for parameter in unit.parameters()):
            yield small
            small = []
    if small:
        yield small


def require_one_format(unit: list[nn.Module], left: dict[nn.Parameter, str]) -> None:
    """Raises InvalidConfiguration where gradients of parameters that are gathered together cannot be summed together.

    left: names of parameters that are gathered with no unit yet; those of this one are taken out.
    """
    gathered = [(left.pop(parameter), parameter) for one in unit for parameter in one.parameters() if parameter in left]
    trained = [(name, _kind(parameter), parameter) for name, parameter in gathered if parameter.requires_grad]
    for name, kind, parameter in trained:
        if parameter.is_complex():
            raise InvalidConfiguration(
                f"`training.model`: the parameter `{name}` is {kind}, and shards sum gradients of real numbers: hold "
                "it as real ones (torch.view_as_real), or use replicas"
            )
        if kind != trained[0][1]:
            raise InvalidConfiguration(
                f"`training.model`: shards gather the parameters of a {type(unit[-1]).__name__} together, and "
                f"`{trained[0][0]}` is {trained[0][1]} where `{name}` is {kind}: give them one format, freeze the one, "
                "or put it into a layer of its own, as `layers()` of the model or an nn.Sequential has them"
            )


def left_whole(models: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The trained parameters that FSDP2 has left whole; none of models that it has not cut."""
    cut = [model for model in models if isinstance(model, FSDPModule)]
    return [one for model in cut for one in model.parameters() if one.requires_grad and not isinstance(one, DTensor)]


def average_whole(parameters: list[nn.Parameter], world: World) -> None:
    """Average the gradients of parameters that are left whole over all replicas. A collective call, unless of none.

    One that no replica has used stays without a gradient, as in one process.
    """
    axes = [name for name in world.device_mesh.mesh_dim_names or () if name in {"replicate", "shard"}]
    if not parameters or world.parts == 1:
        return
    gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    used = torch.tensor([float(one.grad is not None) for one in parameters])
    for axis in axes:
        average([used, *gradients], world.device_mesh.get_group(axis))
    for parameter, gradient, share in zip(parameters, gradients, used.tolist(), strict=True):
        parameter.grad = gradient if share else None


def _kind(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")
