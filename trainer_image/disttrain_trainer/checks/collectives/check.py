"""Runs a Plan on this rank, together with the others: checks first, then times."""

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist

from disttrain_api.collectives import Operation
from disttrain_trainer.checks.collectives.expected import expected
from disttrain_trainer.checks.collectives.operations import Call
from disttrain_trainer.checks.collectives.plan import WORLD, Plan, group_ranks
from disttrain_trainer.checks.collectives.results import Row
from disttrain_trainer.runtime.mesh import World


def check(plan: Plan, world: World) -> Iterator[list[Row]]:
    """The rows of each group, on every rank; all ranks call it together. Raises ValueError for a wrong group."""
    groups = [(name, group_ranks(name, world.size)) for name in plan.groups]
    for name, ranks in groups:
        group = _group(name, ranks)
        # Who is not in the group waits here.
        measured = world.gather(_measure(plan, group, world) if world.rank in ranks else [], list[_Measured])
        yield [_row(name, ranks, index, measured) for index in range(len(measured[ranks[0]]))]


def _group(name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    if name == WORLD:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    return dist.new_group(list(ranks))


_Measured = tuple[Operation, int, float, int]
"""Operation, bytes, seconds of one call, wrong elements; of one rank."""


def _measure(plan: Plan, group: dist.ProcessGroup, world: World) -> list[_Measured]:
    return [_measure_one(plan, operation, size, group, world) for size in plan.sizes for operation in plan.operations]


def _measure_one(plan: Plan, operation: Operation, size: int, group: dist.ProcessGroup, world: World) -> _Measured:
    number_format: torch.dtype = getattr(torch, plan.number_format)
    numbers = plan.numbers(size, dist.get_world_size(group))
    call = Call(operation, group, numbers, number_format, world.device.torch)
    call()
    world.device.synchronize()
    must = expected(operation, call.rank, call.ranks, numbers, number_format)
    wrong = 0 if must is None else int((call.received.cpu() != must).sum())
    call.clear()
    for _ in range(plan.warmup):
        call()
    world.device.synchronize()
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(plan.iterations):
        call()
    world.device.synchronize()
    seconds = (time.perf_counter() - begin) / plan.iterations
    return operation, numbers * plan.number_format.bytes, seconds, wrong


def _row(name: str, ranks: tuple[int, ...], index: int, measured: list[list[_Measured]]) -> Row:
    """The row that the group's ranks have measured together."""
    operation, size, _, _ = measured[ranks[0]][index]
    of_ranks = {rank: measured[rank][index] for rank in ranks}
    return Row(
        group=name,
        ranks=ranks,
        operation=operation,
        bytes=size,
        # A rank that only hands its part over is done before the others: nccl-tests take the mean, too.
        seconds=sum(seconds for _, _, seconds, _ in of_ranks.values()) / len(ranks),
        wrong=sum(wrong for *_, wrong in of_ranks.values()),
        wrong_ranks=tuple(rank for rank, (*_, wrong) in of_ranks.items() if wrong),
    )
