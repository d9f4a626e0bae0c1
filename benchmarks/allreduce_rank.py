"""A rank of allreduce.py: sums by each algorithm in groups of growing size, and tells what it took.

RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment; arguments: megabytes of float32, repeats. Rank 0, which
is in every group, prints a line of JSON per group and algorithm: seconds of each repeat, and the bytes that the busiest
rank has sent or received, whichever is more.
"""

import json
import os
import sys
import time

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist

from benchmarks.allreduce_servers import sums
from disttrain_api.parallelism import AllReduce
from disttrain_trainer.collectives.exchange import all_reduce
from disttrain_trainer.collectives.schedules import SCHEDULES, ring_bytes

WARM = 2


def sum_once(algorithm: AllReduce, values: torch.Tensor, group: dist.ProcessGroup) -> None:
    """One all-reduce. Raises RuntimeError where this rank has not sent what the plan says."""
    if algorithm is AllReduce.BACKEND:
        dist.all_reduce(values, group=group)
        return
    schedule = SCHEDULES[algorithm](group.size())
    sent, planned = all_reduce(values, schedule, group), schedule.sent(dist.get_rank(group), values.numel(), 4)
    if sent != planned:
        raise RuntimeError(f"{algorithm} sent {sent} bytes, and its plan says {planned}")


def hottest_link(algorithm: AllReduce, ranks: int, numbers: int) -> int:
    """Bytes over the busiest rank's connection; of the backend's those of a ring, by formula."""
    if algorithm is AllReduce.BACKEND:
        return ring_bytes(ranks, 4 * numbers)
    return SCHEDULES[algorithm](ranks).hottest_link(numbers, 4)


def measure(algorithm: AllReduce, values: torch.Tensor, repeats: int, group: dist.ProcessGroup) -> list[float]:
    """Seconds of each repeat, from all ranks' begin to all ranks' end. Raises RuntimeError where the sum is wrong."""
    seconds = []
    for repeat in range(WARM + repeats):
        values.fill_(1)
        dist.barrier(group)
        began = time.perf_counter()
        sum_once(algorithm, values, group)
        dist.barrier(group)
        if repeat >= WARM:
            seconds.append(time.perf_counter() - began)
        if not (values == group.size()).all():
            raise RuntimeError(f"{algorithm} of {group.size()} ranks does not give their sum")
    return seconds


def print_result(ranks: int, algorithm: str, seconds: list[float], hottest: int) -> None:
    """Rank 0's line."""
    if dist.get_rank() == 0:
        result = {"ranks": ranks, "algorithm": algorithm, "seconds": seconds, "hottest": hottest}
        print(json.dumps(result), flush=True)


def main() -> None:
    numbers, repeats = int(float(sys.argv[1]) * 2**20) // 4, int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for ranks in range(2, dist.get_world_size() + 1):
        group = dist.new_group(list(range(ranks)))
        for algorithm in AllReduce if dist.get_rank() < ranks else ():
            seconds = measure(algorithm, torch.empty(numbers), repeats, group)
            hottest = hottest_link(algorithm, ranks, numbers)
            print_result(ranks, algorithm, seconds, hottest)
        if dist.get_rank() < ranks:
            found = list(sums(torch.empty(numbers), WARM + repeats, group))
            print_result(ranks, "Servers", [one for one, _ in found[WARM:]], max(sent for _, sent in found))
        # Who is not in the group sleeps here, and takes no core from those who are.
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
