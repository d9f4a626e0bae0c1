"""From a whole model to this rank's part of a pipeline."""

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from disttrain_api.cut_sizes import EXPERTS_WITHOUT_FLUSH, TIED_WITHOUT_FLUSH
from disttrain_api.pipeline import index_of_stage, is_flushless
from disttrain_trainer.losses import WeightedLoss
from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.optim.precision import MixedPrecision
from disttrain_trainer.parallel.activations import offload, recompute
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.parallel.expert import expert_layers, spread_experts
from disttrain_trainer.parallel.layers import compile_layers
from disttrain_trainer.parallel.meta import give_values
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.parallel.pipedream.stage_schedule import plans_of
from disttrain_trainer.parallel.pipeline.measure import seconds_of_layers
from disttrain_trainer.parallel.pipeline.part import PipelinePart
from disttrain_trainer.parallel.pipeline.pipeline import Pipeline
from disttrain_trainer.parallel.pipeline.split import Layers, split_layers
from disttrain_trainer.parallel.pipeline.stages import (
    Around,
    Stage,
    StageBetween,
    drop_others,
    holders_of,
    names_of,
    require_apart,
    retie,
)
from disttrain_trainer.parallel.sharded import is_sharded, shard
from disttrain_trainer.parallel.tensor import share_layers
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World


def build_pipeline(
    module: nn.Module,
    config: Config,
    world: World,
    loss: WeightedLoss,
    precision: MixedPrecision,
    routing: RoutingOfStep,
    sample: Callable[[], Tensor],
    documents: Documents | None,
) -> PipelinePart:
    """Cut `module` (in place) down to the layers of this rank, and arrange them as stages.

    sample: inputs [B, ...] of a microbatch, asked for where layers are split by the time they take.
    Raises InvalidConfiguration where the model cannot be cut so.
    """
    training, parallelism = config.training, config.job.parallelism

    def seconds_of(layers: Layers) -> list[float]:
        return world.from_first(lambda: seconds_of_layers(layers, sample(), world.device), list[float])

    split = split_layers(module, parallelism, seconds_of)
    share_layers(module, parallelism, world)
    experts = spread_experts(module, parallelism, world)
    # Gradients of the output layers would be held for each microbatch that is under way.
    loss.take_over(at_once=False)
    indices = index_of_stage(parallelism)
    holders = holders_of(split, indices)
    sharded = is_sharded(training, world)
    if sharded:
        require_apart(holders, split)
    if is_flushless(parallelism):
        _require_plain(module)
        _require_untied(holders, names_of(module))
    place = world.at["pipeline"]
    own = {number: layers for number, layers in enumerate(split) if indices[number] == place}
    layers = [layer for stage in own.values() for layer in stage]
    drop_others(module, layers)
    # The model's last layer is followed by its backward pass at once: computing it anew would save nothing.
    recompute([layer for layer in layers if layer is not split[-1][-1]], training.activation_checkpointing)
    if training.compile:
        compile_layers(layers)
    around: tuple[Around, ...] = (
        precision.autocast,
        lambda: offload(precision.device, training.offload.activations),
    )
    stages: dict[int, nn.Module] = {
        number: _stage(part, around, world.device, last=number == len(split) - 1) for number, part in own.items()
    }
    # FSDP2 puts other objects in the parameters' places.
    names = names_of(module)
    if sharded:
        for number, stage in stages.items():
            shard(stage, own[number], training, world, experts, in_turn=True)
        retie(module, names, layers)
    give_values(module, config, world)
    if is_flushless(parallelism):
        plans = plans_of(parallelism, config.batch)
        versions = {plan.stage: plan.versions for plan in plans}
        return Flow(stages, parallelism, world, loss, precision, plans[place], module, versions, config.timeout)
    groups, copies = _shared(names, holders, module, world)
    return Pipeline(
        stages=stages,
        parallelism=parallelism,
        world=world,
        loss=loss,
        precision=precision,
        routing=routing,
        passes=config.batch.accumulation,
        shared=groups,
        copies=copies,
        documents=documents,
    )


def _require_plain(module: nn.Module) -> None:
    """Raises InvalidConfiguration for layers with experts."""
    if expert_layers(module):
        raise InvalidConfiguration(
            f"`parallelism.pipeline.schedule`: {type(module).__name__} has layers with experts: "
            f"{EXPERTS_WITHOUT_FLUSH}; use another schedule"
        )


def _require_untied(holders: Mapping[nn.Parameter, Sequence[int]], names: Mapping[int, list[str]]) -> None:
    """Raises InvalidConfiguration naming the first parameter that several stages hold."""
    for parameter, indices in holders.items():
        if len(indices) > 1:
            raise InvalidConfiguration(
                f"`parallelism.pipeline.schedule`: stages {', '.join(map(str, indices))} share "
                f"{' and '.join(names[id(parameter)])}: {TIED_WITHOUT_FLUSH}, or use another schedule"
            )


def _stage(layers: Layers, around: Sequence[Around], device: Device, *, last: bool) -> Stage:
    """The layers as a stage, whose inputs come to its device from where messages arrive."""
    if device.channel == device.torch:
        return Stage(layers, around)
    # The loss is computed where the last layer is.
    return StageBetween(layers, around, device.torch, device.torch if last else device.channel)


def _shared(
    names: Mapping[int, list[str]],
    holders: Mapping[nn.Parameter, Sequence[int]],
    module: nn.Module,
    world: World,
) -> tuple[list[tuple[nn.Parameter, dist.ProcessGroup]], dict[nn.Parameter, int]]:
    """This rank's parameters that other pipeline indices hold, with the group of those that hold the same piece, and
    how many they are. Every rank makes every group, in the same order.
    """
    groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
    copies: dict[nn.Parameter, int] = {}
    for original, indices in holders.items():
        if len(indices) == 1:
            continue
        for ranks in world.mesh.groups("pipeline"):
            members = [ranks[index] for index in indices]
            group = dist.new_group(members)
            if world.rank in members:
                parameter = module.get_parameter(names[id(original)][0])
                groups.append((parameter, group))
                copies[parameter] = len(indices)
    return groups, copies
