"""Cross-entropy of logits that are cut along the vocabulary (Megatron-LM, Shoeybi et al. 2019, section 3).

Each rank holds [..., V / t] of the logits. Only three numbers per token cross the wire (the largest logit, the sum of
exponentials, the logit of the target; with label smoothing the sum of logits), never the logits.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def vocabulary_cross_entropy(logits: DTensor, targets: Tensor, ignored: int, smoothing: float) -> Tensor:
    """Loss of each token, as torch's cross_entropy with reduction "none".

    logits: [..., V], cut along the last dimension over a 1-D mesh; targets: [...] of classes or `ignored`.
    """
    mesh = logits.device_mesh
    return _CrossEntropy.apply(logits.to_local(), targets, logits.shape[-1], mesh.get_group(), ignored, smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        targets: Tensor,
        size: int,
        group: dist.ProcessGroup,
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        own = local.shape[-1]
        first = dist.get_rank(group) * own
        counted = targets != ignored
        here = counted & (targets >= first) & (targets < first + own)
        index = torch.where(here, targets - first, 0).unsqueeze(-1)

        largest = local.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        shifted = local - largest.unsqueeze(-1)
        exponentials = shifted.exp()
        sums = torch.stack([exponentials.sum(-1), shifted.gather(-1, index).squeeze(-1) * here, shifted.sum(-1)])
        dist.all_reduce(sums, group=group)
        total, target, shifted_sum = sums
        log_total = total.log()
        loss = (log_total - target) * (1 - smoothing) + (log_total - shifted_sum / size) * smoothing

        ctx.save_for_backward(exponentials / total.unsqueeze(-1), index, here, counted)
        ctx.size, ctx.smoothing = size, smoothing
        return loss * counted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, index, here, counted = ctx.saved_tensors
        wanted = here.unsqueeze(-1).to(probabilities.dtype) * (1 - ctx.smoothing)
        local = probabilities.scatter_add(-1, index, -wanted) - ctx.smoothing / ctx.size
        return local * (gradient * counted).unsqueeze(-1), None, None, None, None, None
