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

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from disttrain_trainer.metrics import report, stragglers
from disttrain_trainer.metrics.own_time import PassClock
from disttrain_trainer.runtime.device import Device
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
    """Make the clocks of all ranks the latest of them where FSDP2 waits for gathered parameters, and for gradients.

    For parameters a CPU waits in `unshard`, a GPU in `wait_for_unshard`: here the first linear layer does the latter.
    """
    gathers, gathered = FSDPParamGroup.unshard, FSDPParamGroup.wait_for_unshard

    def of_first(group: FSDPParamGroup) -> bool:
        return getattr(group.modules[0], "in_features", None) == 6

    FSDPParamGroup.unshard = met(gathers, lambda group: not of_first(group))
    FSDPParamGroup.wait_for_unshard = met(gathered, of_first)
    FSDPParamGroup.post_backward = met(FSDPParamGroup.post_backward, lambda group: True)


def met(call: Callable[..., None], waits: Callable[[FSDPParamGroup], bool]) -> Callable[..., None]:
    def meet(group: FSDPParamGroup, *arguments: object) -> None:
        call(group, *arguments)
        if waits(group):
            now = torch.tensor(CLOCK.now, dtype=torch.float64)
            dist.all_reduce(now, dist.ReduceOp.MAX)
            CLOCK.now = now.item()

    return meet


def main() -> None:
    hold_back_rank_1(Path(os.environ["CASES"], "ended"))
    let_time_pass_in_waits()
    Device.mark = lambda self: moment()
    report.time = synchronous.time = SimpleNamespace(monotonic=moment)
    stragglers.WINDOW_SECONDS = 0.01
    cases.main()


if __name__ == "__main__":
    main()
