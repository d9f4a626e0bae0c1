"""Models that are larger than a device, or than a machine: built without memory, cut, and only then given values.

On torch's meta device a tensor has a shape and no data. What wraps the model cuts such tensors, too. Afterwards each
rank allocates what it keeps, and one layer at a time is initialised as a whole and cut: parameters depend on the seed
alone, whatever the layout, and a rank never holds more than its part and one layer.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from disttrain_trainer.parallel.tensor import replace_parameter, shared_parameters
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import seed_everything

_FIELD = "`training.model.metaDevice`"


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """The model without memory. Raises InvalidConfiguration where it cannot be initialised layer by layer."""
    with torch.device("meta"):
        module = build()
    if offered(module, "initialise_layer") is None:
        raise InvalidConfiguration(
            f"{_FIELD}: the model {type(module).__name__} has no method `initialise_layer(layer)`, which gives values "
            "to the parameters and buffers that a layer holds itself; add it, or remove the field"
        )
    return module


def give_values(module: nn.Module, config: Config, world: World) -> None:
    """Materialise a model that was built on the meta device; nothing otherwise."""
    if config.builds_on_meta:
        in_host = config.training.offload.parameters
        materialise(module, torch.device("cpu") if in_host else world.device.torch, config.training.seed)


def materialise(module: nn.Module, device: torch.device, seed: int) -> None:
    """Give memory on `device` to the parts that this rank keeps, and values; in place, without communication.

    Raises InvalidConfiguration where `initialise_layer` leaves a parameter without values.
    """
    tied = list(shared_parameters(module))
    module.to_empty(device=device)
    for first, *others in tied:
        for name in others:
            replace_parameter(module, name, module.get_parameter(first))
    filled: set[int] = set()
    for number, (name, layer) in enumerate(module.named_modules()):
        # Ranks of a pipeline skip layers: each has random numbers of its own.
        seed_everything(seed, number)
        own = [parameter for parameter in layer.parameters(recurse=False) if id(parameter) not in filled]
        if own or list(layer.buffers(recurse=False)):
            _fill(module, name, layer, filled)
        filled |= {id(parameter) for parameter in own}


@torch.no_grad()
def _fill(module: nn.Module, name: str, layer: nn.Module, filled: set[int]) -> None:
    """Initialise one layer as a whole, on the CPU, whose random numbers are those of every device's host."""
    kept = {key: parameter for key, parameter in layer._parameters.items() if parameter is not None}
    whole = {key: nn.Parameter(_unset(torch.empty(p.shape, dtype=p.dtype))) for key, p in kept.items()}
    for buffer in layer.buffers(recurse=False):
        _unset(buffer)
    layer._parameters.update(whole)
    try:
        module.initialise_layer(layer)  # type: ignore[operator]
    finally:
        layer._parameters.update(kept)
    for key, value in (*whole.items(), *layer.named_buffers(recurse=False)):
        if _has_unset(value):
            raise InvalidConfiguration(
                f"{_FIELD}: {type(module).__name__}.initialise_layer leaves `{f'{name}.{key}'.lstrip('.')}` of a "
                f"{type(layer).__name__} without values"
            )
    for key, parameter in kept.items():
        if id(parameter) not in filled:
            local_part(parameter).copy_(local_part(cut(whole[key], parameter)))


def _unset(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, integers with their largest, so that one without a value is detected and not trained.
    Truth values have no room for it: they are False."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(torch.nan)
    return tensor.zero_() if tensor.dtype is torch.bool else tensor.fill_(torch.iinfo(tensor.dtype).max)


def _has_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())


def cut(whole: Tensor, like: Tensor) -> Tensor:
    """`whole`, which every rank has, on the device of `like` and cut as it is; without communication."""
    there = whole.detach().to(like.device)
    if not isinstance(like, DTensor):
        return there
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)
