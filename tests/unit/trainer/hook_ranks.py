"""A rank whose gradients are summed by our hooks and by torch's; see test_gradient_hooks.py."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from disttrain_api.parallelism import Compression, CompressionName, DataParallel
from disttrain_trainer.parallel.comm_hooks.attach import build_gradient_sum
from disttrain_trainer.parallel.comm_hooks.base import reduce_bucket

HOOKS = {CompressionName.FP16: fp16_compress_hook, CompressionName.BF16: bf16_compress_hook}


class Weighted(nn.Module):
    """The gradient of its parameter [n] is its input [n]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient_of(rank: int) -> Tensor:
    """[1001] none so small that a short format has fewer digits for it; the last one of rank 0 too large for FP16."""
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    large = torch.tensor([0.0 if rank else 70000.0])
    return torch.cat([values.sign() * values.abs().clamp(min=0.01), large])


def summed(gradient: Tensor, state: object, hook: object) -> Tensor:
    """[n] the mean that DDP gives with this hook."""
    model = DistributedDataParallel(Weighted(len(gradient)))
    model.register_comm_hook(state, hook)
    model(gradient).backward()
    found = model.module.weight.grad
    return found.clone()


def main() -> None:
    dist.init_process_group("gloo")
    gradient = gradient_of(dist.get_rank())
    results = {}
    for name, hook in HOOKS.items():
        own = build_gradient_sum(DataParallel(compression=Compression(name=name)), dist.group.WORLD, 0)
        results[name.value] = (summed(gradient, own, reduce_bucket), summed(gradient, None, hook))
    torch.save(results, Path(os.environ["RESULTS"], f"{dist.get_rank()}.pt"))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
