"""Which way of summing gradients a manifest asks for, and how DDP comes to it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from disttrain_api.parallelism import AllReduce, CompressionName, DataParallel, DataParallelMode
from disttrain_trainer.compression.blocks import INT8, ONE_BIT
from disttrain_trainer.parallel.comm_hooks.base import BackendSum, DenseSum, GradientSum, HookedSum, reduce_bucket
from disttrain_trainer.parallel.comm_hooks.blocks import BlockSum
from disttrain_trainer.parallel.comm_hooks.low_rank import LowRankSum
from disttrain_trainer.parallel.comm_hooks.sparse import RandomKSum, TopKSum
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World

_FORMATS = {CompressionName.FP16: torch.float16, CompressionName.BF16: torch.bfloat16}


def attach_gradient_sum(model: nn.Module, config: Config, world: World) -> GradientSum | None:
    """The way the model's gradients are summed, as its hook where it needs one; None where DDP does not sum them."""
    settings = config.job.parallelism.data_parallel
    if not isinstance(model, DistributedDataParallel) or settings.mode is DataParallelMode.PARAMETER_SERVER:
        # A group of ranks that pushes to servers sums within its pod, where nothing needs to be left out.
        return None
    group = world.device_mesh.get_group("replicate")
    if settings.all_reduce is AllReduce.BACKEND and settings.compression is None:
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        return BackendSum(group, sum(parameter.nbytes for parameter in trained))
    chosen = build_gradient_sum(settings, group, config.training.seed)
    model.register_comm_hook(chosen, reduce_bucket)
    return chosen


def build_gradient_sum(settings: DataParallel, group: dist.ProcessGroup, seed: int) -> HookedSum:
    """The one with a hook that `settings` ask for; `seed` is the job's."""
    compression, algorithm = settings.compression, settings.all_reduce
    if compression is None:
        return DenseSum(group, algorithm, algorithm, None)
    match compression.name:
        case CompressionName.FP16 | CompressionName.BF16:
            return DenseSum(group, compression.name, algorithm, _FORMATS[compression.name])
        case CompressionName.INT8:
            return BlockSum(group, compression.name, INT8, feedback=False)
        case CompressionName.ONE_BIT:
            warmup = compression.warmup_steps or 0
            return BlockSum(group, compression.name, ONE_BIT, feedback=True, warmup_steps=warmup)
        case CompressionName.TOP_K:
            return TopKSum(group, compression)
        case CompressionName.RANDOM_K:
            return RandomKSum(group, compression, algorithm, seed)
        case CompressionName.POWER_SGD:
            return LowRankSum(group, compression, seed)
