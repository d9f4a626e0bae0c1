"""A rank that sums by each of our algorithms, in groups of every size; see test_collectives.py."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

from disttrain_trainer.collectives.exchange import all_reduce
from disttrain_trainer.collectives.schedules import SCHEDULES

# Fewer numbers than ranks, a multiple of no size, and of all.
SIZES = (0, 1, 3, 7, 24, 1001)
FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def numbers(rank: int, size: int, number_format: torch.dtype) -> torch.Tensor:
    """What a rank brings along: small whole numbers, whose sums are exact in every format."""
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randint(-8, 9, (size,), generator=generator).to(number_format)


def unround(rank: int) -> torch.Tensor:
    """Numbers whose sum depends on the order."""
    return torch.randn(97, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    # The last ranks, so that a rank's number in the group is not its number in the world.
    for ranks in range(1, world + 1):
        members = list(range(world - ranks, world))
        group = dist.new_group(members)
        if rank not in members:
            continue
        own = dist.get_rank(group)
        for algorithm, plan in SCHEDULES.items():
            schedule = plan(ranks)
            for size in SIZES:
                for number_format in FORMATS:
                    values = numbers(own, size, number_format)
                    sent = all_reduce(values, schedule, group)
                    results[(algorithm.value, ranks, size, number_format)] = (values, sent)
            square = unround(own).view(-1, 1)
            all_reduce(square, schedule, group)
            backend = unround(own)
            dist.all_reduce(backend, group=group)
            results[(algorithm.value, ranks)] = (square.view(-1), backend)
    torch.save(results, Path(os.environ["RESULTS"], f"{rank}.pt"))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
