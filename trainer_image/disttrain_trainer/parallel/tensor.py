"""Tensor parallelism: the ranks of a tensor group share each layer (Megatron-LM, Shoeybi et al. 2019, section 3).

How a model is cut is the model's to say: it offers `tensor_plan(*, sequence, vocabulary)`, which returns a
torch.distributed.tensor.parallel style for each submodule (by name, with shell wildcards). With `sequence` what
lies between the shared layers is cut along the sequence (Korthikanti et al. 2022); with `vocabulary` the logits come as
a DTensor that is cut along the vocabulary (parallel/vocabulary_loss.py). A model that cannot do one of the two raises
ValueError with the reason.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatch

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from disttrain_api.parallelism import Parallelism
from disttrain_trainer.parallel.async_tensor import overlap_products
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import InvalidConfiguration, one_line
from disttrain_trainer.runtime.mesh import World


def share_layers(module: nn.Module, parallelism: Parallelism, world: World) -> None:
    """Cut the module's layers over its tensor group, in place; nothing where the group is one rank.

    Raises InvalidConfiguration where the model offers no plan, or a size does not divide by the degree.
    """
    degree = world.mesh.tensor
    if degree == 1:
        return
    plan = _plan_of(module, parallelism)
    tied = list(shared_parameters(module))
    _require_targets(module, plan)
    frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    parallelize_module(module, world.device_mesh["tensor"], dict(plan))
    # torch's SequenceParallel puts parameters into their places that are trained.
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    for first, *others in tied:
        for name in others:
            replace_parameter(module, name, module.get_parameter(first))
    _require_even(module, degree)
    overlap_products(world, wanted=bool(parallelism.async_tensor_parallel))


def _plan_of(module: nn.Module, parallelism: Parallelism) -> Mapping[str, ParallelStyle]:
    plan_of = offered(module, "tensor_plan")
    if plan_of is None:
        raise InvalidConfiguration(
            f"`parallelism.tensorParallelDegree`: the model {type(module).__name__} has no method `tensor_plan`, which "
            "says how its layers are cut; add it, or use `dataParallelShardDegree` instead"
        )
    sequence, vocabulary = bool(parallelism.sequence_parallel), bool(parallelism.vocabulary_parallel)
    try:
        plan: Mapping[str, ParallelStyle] = plan_of(sequence=sequence, vocabulary=vocabulary)
    except (TypeError, ValueError) as error:
        raise InvalidConfiguration(
            f"`parallelism`: {type(module).__name__}.tensor_plan(sequence={sequence}, vocabulary={vocabulary}) raised "
            f"{type(error).__name__}: {one_line(error)}"
        ) from error
    return plan


def _require_targets(module: nn.Module, plan: Mapping[str, ParallelStyle]) -> None:
    """parallelize_module passes over names that lead nowhere, and the layer would silently stay whole."""
    names = [name.split(".") for name, _ in module.named_modules()]

    def found(pattern: list[str]) -> bool:
        return any(
            len(name) == len(pattern) and all(fnmatch(part, want) for want, part in zip(pattern, name, strict=True))
            for name in names
        )

    for target in plan:
        if not found(target.split(".")):
            raise InvalidConfiguration(
                f"`parallelism.tensorParallelDegree`: {type(module).__name__}.tensor_plan names `{target}`, but the "
                "model has no such submodule"
            )


def shared_parameters(module: nn.Module) -> Iterable[list[str]]:
    """Names of each parameter that has several: parallelize_module would make one of each."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter in the place of this name."""
    owner, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(owner), attribute, parameter)


def _require_even(module: nn.Module, degree: int) -> None:
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, DTensor):
            continue
        for placement in parameter.placements:
            dimension = getattr(placement, "dim", None)
            if dimension is not None and parameter.shape[dimension] % degree:
                raise InvalidConfiguration(
                    f"`parallelism.tensorParallelDegree`: size {parameter.shape[dimension]} (dimension {dimension} of "
                    f"parameter `{name}`) must be a multiple of {degree}"
                )


def settle_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give each gradient the placement of its parameter: that of a replicated one may still be a sum to be taken."""
    for parameter in parameters:
        gradient = parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
            continue
        # Where nothing is to change, as for shards, a call for each parameter would still take longer than the norm.
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
