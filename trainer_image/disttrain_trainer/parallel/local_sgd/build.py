"""The replicas that a manifest asks for."""

import torch
import torch.distributed as dist
from torch import nn

from disttrain_api.relaxed import Bmuf, LocalSgd
from disttrain_trainer.parallel.local_sgd.replicas import Groups, Replicas
from disttrain_trainer.parallel.local_sgd.sync_schedule import Plan
from disttrain_trainer.parallel.local_sgd.update import BlockMomentum, OuterSgd, Update, default_block_momentum
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World


def build_replicas(
    module: nn.Module, optimizer: torch.optim.Optimizer, config: Config, world: World
) -> Replicas | None:
    """Return the replicas of `dataParallel.mode` LocalSGD and BMUF, where each rank is one; None in other modes."""
    data_parallel = config.job.parallelism.data_parallel
    settings = data_parallel.relaxed
    if settings is None:
        return None
    plan = Plan.of(settings, config.training.steps)
    everyone = world.device_mesh.get_group("replicate")
    pod = everyone if plan.global_period == plan.period else _own_pod(config)
    update = build_update(settings, world.replicas)
    groups = Groups(everyone, pod)
    return Replicas(data_parallel.mode, module, optimizer, world, groups, plan, update, settings.optimizer_state)


def build_update(settings: LocalSgd | Bmuf, replicas: int) -> Update | None:
    """Return the update of the average of all; None if the plain average is used."""
    if isinstance(settings, Bmuf):
        momentum = settings.block_momentum
        chosen = default_block_momentum(replicas) if momentum is None else momentum
        return BlockMomentum(chosen, settings.block_learning_rate, settings.nesterov)
    outer = settings.outer_optimizer
    return None if outer is None else OuterSgd(outer.learning_rate, outer.momentum)


def _own_pod(config: Config) -> dist.ProcessGroup:
    """The ranks of this one's pod. Every rank makes the groups of all pods, in the same order."""
    size = config.local_world_size
    pods = [list(range(first, first + size)) for first in range(0, config.world_size, size)]
    groups = [dist.new_group(ranks, timeout=config.timeout) for ranks in pods]
    return groups[config.rank // size]
