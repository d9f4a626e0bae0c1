"""Cases with the clock of slow_rank_code.py.

Rank 1 begins the passes of each step but the first when rank 0 has noted the end of its own: before rank 0 waits for
rank 1's gradients, that is, or nobody would ever go on. Ranks of shards meet within their passes instead: the clock of
the one that waits goes on until the other one is there.
"""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from disttrain_trainer.metrics import own_time, report, stragglers
from disttrain_trainer.metrics.own_time import PassClock
from disttrain_trainer.metrics.waits import Waits
from disttrain_trainer.runtime.device import Device, Span
from disttrain_trainer.strategies import synchronous
from tests.unit.trainer import cases
from tests.unit.trainer.slow_rank_code import CLOCK
from tests.waiting import until


def moment() -> float:
    """Now. No two moments are the same."""
    CLOCK.now += 1e-6
    return CLOCK.now


def hold_back_rank_1(file: Path) -> None:
    """Make rank 1's passes come after those of rank 0. file: holds how many rank 0 has ended."""
    begin, mark = PassClock.begin, PassClock._mark
    passes = count(1)

    def begin_later(clock: PassClock) -> None:
        if clock._waits is None:
            number = next(passes)
            # DDP agrees on its buckets in the forward pass of the first one.
            if clock.take() is not None:
                until(lambda: file.exists() and file.stat().st_size >= number)
        begin(clock)

    def mark_and_say_so(clock: PassClock) -> None:
        mark(clock)
        if clock._waits is None:
            with file.open("a") as ended:
                ended.write(".")

    if os.environ["RANK"] == "1":
        PassClock.begin = begin_later
    else:
        PassClock._mark = mark_and_say_so


def let_time_pass_in_waits() -> None:
    """Make the clocks of all ranks the latest of them where timed passes wait: for FSDP2's gathered parameters and its
    gradients, for DDP's buffers, for collectives and messages, and for functional collectives.

    For parameters a CPU waits in `unshard`, a GPU in `wait_for_unshard`: here the first linear layer does the latter.
    """
    meetings = SimpleNamespace(on=False)
    wait, begin, end = Work.wait, Waits.begin, Waits.end

    def met(call: Callable[..., Any], waits: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        def meet(*arguments: Any) -> Any:
            result = call(*arguments)
            if meetings.on and waits(arguments[0]):
                now = torch.tensor(CLOCK.now, dtype=torch.float64)
                wait(dist.all_reduce(now, dist.ReduceOp.MAX, async_op=True))
                CLOCK.now = now.item()
            return result

        return meet

    def of_first(group: FSDPParamGroup) -> bool:
        return getattr(group.modules[0], "in_features", None) == 6

    def begin_meeting(waits: Waits) -> None:
        begin(waits)
        meetings.on = True

    def end_meeting(waits: Waits) -> list[Span]:
        meetings.on = False
        return end(waits)

    FSDPParamGroup.unshard = met(FSDPParamGroup.unshard, lambda group: not of_first(group))
    FSDPParamGroup.wait_for_unshard = met(FSDPParamGroup.wait_for_unshard, of_first)
    FSDPParamGroup.post_backward = met(FSDPParamGroup.post_backward)
    Work.wait, functional.wait_tensor = met(wait), met(functional.wait_tensor)
    DistributedDataParallel._sync_buffers = met(DistributedDataParallel._sync_buffers)
    Waits.begin, Waits.end = begin_meeting, end_meeting


def main() -> None:
    hold_back_rank_1(Path(os.environ["CASES"], "ended"))
    let_time_pass_in_waits()
    Device.mark = lambda self: moment()
    report.time = synchronous.time = SimpleNamespace(monotonic=moment)
    stragglers.WINDOW_SECONDS = 0.01
    # Ranks that meet in timed passes time the same ones: those after a line of the log.
    own_time.APART_SECONDS = 1e9
    cases.main()


if __name__ == "__main__":
    main()
