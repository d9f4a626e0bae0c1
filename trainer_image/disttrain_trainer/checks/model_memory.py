"""A model that cannot fit is refused before it fills the memory and the kernel kills something."""

from torch import nn

from disttrain_api.memory import LeastMemory, ModelSize, builtin_size, in_words, least_memory
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.host_limits import memory_limit
from disttrain_trainer.runtime.mesh import World


def require_memory_to_build(config: Config, world: World) -> None:
    """Raise InvalidConfiguration where a built-in model, whose size is known before it is built, cannot fit."""
    size = builtin_size(config.training)
    if size is not None:
        _require(size, str(config.training.model.name), config, world)


def require_memory_to_train(module: nn.Module, config: Config, world: World) -> None:
    """Raise InvalidConfiguration where the model, whole and perhaps without values by now, cannot be trained here."""
    _require(size_of(module), type(module).__name__, config, world)


def size_of(module: nn.Module) -> ModelSize:
    """Return the size of a model."""
    parameters = list(module.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in parameters),
        trained=sum(parameter.numel() for parameter in trained),
        bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        trained_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trained),
    )


def _require(size: ModelSize, name: str, config: Config, world: World) -> None:
    mode = config.job.parallelism.data_parallel.mode
    least = least_memory(size, config.training, world.mesh, mode, on_meta=config.builds_on_meta)
    limit, ranks = memory_limit(), config.local_world_size
    needed = _in_host(least, config, world, ranks)
    if limit is not None and needed > limit:
        raise InvalidConfiguration(sentence(size, name, needed, ranks, limit))


def _in_host(least: LeastMemory, config: Config, world: World, ranks: int) -> int:
    """Bytes of the host's memory that the ranks of this pod need together."""
    if world.device.computes_on_host or config.training.offload.parameters:
        return least.of_ranks(ranks)
    return least.whole


def sentence(size: ModelSize, name: str, needed: int, ranks: int, limit: int) -> str:
    """Why the model cannot fit, with the numbers, and what to do."""
    return (
        f"`training.model`: {name} has {size.parameters:,} parameters, for which the ranks of this pod ({ranks}) need "
        f"at least {in_words(needed)} of memory, and there are {in_words(limit)}: use a smaller model, a larger memory "
        "limit, or cut the model over more pods (`parallelism`), with `training.model.metaDevice` where not even one "
        "rank can hold it whole"
    )
