"""Batch normalisation over the batches of all replicas (Peng et al. 2018, "MegDet", section 3.2).

On GPUs torch's own nn.SyncBatchNorm; it knows no other device, so CPUs have the layer below, of the same algorithm: one
gather of means and squared deviations in the forward pass, one sum of two numbers per channel in the backward pass.
Shapes: B batch of this rank, C channels, * any further dimensions.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World


def synchronise_batch_norm(module: nn.Module, world: World) -> nn.Module:
    """The module (in place), its BatchNorm layers looking at the batches of all replicas. Names stay as they are.

    Raises InvalidConfiguration where it has no such layer.
    """
    if not any(isinstance(layer, _BatchNorm) for layer in module.modules()):
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.syncBatchNorm`: {type(module).__name__} has no BatchNorm layer; remove it"
            " (the built-in resnet has them with `config.norm` Batch)"
        )
    group = replicas_group(world)
    if world.device.has_sync_batch_norm:
        return nn.SyncBatchNorm.convert_sync_batchnorm(module, group)
    return _converted(module, group)


def replicas_group(world: World) -> dist.ProcessGroup:
    """The ranks that hold other parts of the batch and the same part of the layers; all ranks call it together."""
    names = tuple(name for name in world.device_mesh.mesh_dim_names or () if name in {"replicate", "shard"})
    mesh = world.device_mesh[names]
    return (mesh._flatten("replicas") if len(names) > 1 else mesh).get_group()


def _converted(module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return SyncBatchNorm(module, group)
    for name, child in module.named_children():
        setattr(module, name, _converted(child, group))
    return module


class SyncBatchNorm(_BatchNorm):
    """[B, C, *] -> [B, C, *]; parameters and running statistics are those of the layer that it replaces."""

    def __init__(self, replaced: _BatchNorm, group: dist.ProcessGroup) -> None:
        super().__init__(
            replaced.num_features, replaced.eps, replaced.momentum, replaced.affine, replaced.track_running_stats
        )
        self.weight, self.bias = replaced.weight, replaced.bias
        self.running_mean, self.running_var = replaced.running_mean, replaced.running_var
        self.num_batches_tracked = replaced.num_batches_tracked
        self.training = replaced.training
        self._group = group

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - torch's name
        if input.dim() < 2:
            raise ValueError(f"expected [B, C, ...], found {list(input.shape)}")

    # Its collectives are no matter for a compiler.
    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        normalised, mean, variance, count = _Normalise.apply(input, self.eps, self._group)
        if self.running_mean is not None:
            self._track(mean, variance, count)
        if not self.affine:
            return normalised
        shape = _per_channel(input)
        return (normalised * self.weight.view(shape) + self.bias.view(shape)).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Exponential means as nn.BatchNorm keeps them: of the unbiased variance; without momentum plain means."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalise(torch.autograd.Function):
    """[B, C, *] -> the same with mean 0 and variance 1 per channel; mean [C], variance [C], and numbers per channel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shape, others = _per_channel(x), _but_channels(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, count = combined(*_moments(wide, others), group)
        scale = torch.rsqrt(variance + epsilon)
        normalised = (wide - mean.view(shape)) * scale.view(shape)
        ctx.save_for_backward(normalised, scale, count)
        ctx.group, ctx.dtype = group, x.dtype
        ctx.mark_non_differentiable(mean, variance, count)
        return normalised.to(x.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        normalised, scale, count = ctx.saved_tensors
        shape, others = _per_channel(gradient), _but_channels(gradient)
        wide = gradient.to(normalised.dtype)
        # Every output of every rank depends on mean and variance: their part is summed over all of them.
        sums = torch.stack([wide.sum(others), (wide * normalised).sum(others)])
        dist.all_reduce(sums, group=ctx.group)
        of_mean, of_variance = sums / count
        result = (wide - of_mean.view(shape) - normalised * of_variance.view(shape)) * scale.view(shape)
        return result.to(ctx.dtype), None, None


def _moments(x: Tensor, others: list[int]) -> tuple[Tensor, Tensor, int]:
    """Mean [C] and sum of squared deviations from it [C] of this rank, and numbers per channel."""
    count = x.numel() // x.shape[1]
    mean = x.mean(others) if count else x.new_zeros(x.shape[1])
    return mean, (x - mean.view(_per_channel(x))).square().sum(others), count


def combined(mean: Tensor, squares: Tensor, count: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean [C], biased variance [C] and numbers per channel of all ranks (Chan, Golub and LeVeque 1979).

    Raises ValueError where one number per channel is all there is, as nn.BatchNorm does.
    """
    own = torch.cat([mean, squares, mean.new_tensor([count])])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    rows = torch.stack(gathered)
    channels = len(mean)
    means, squares_of, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    if total <= 1:
        raise ValueError("batch normalisation needs more than one number per channel over all replicas")
    whole = (means * counts).sum(0) / total
    return whole, (squares_of + counts * (means - whole).square()).sum(0) / total, total


def _per_channel(x: Tensor) -> list[int]:
    return [1, -1, *[1] * (x.dim() - 2)]


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]
