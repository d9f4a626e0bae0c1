"""The most memory that a process holds in the course of something, as the kernel counts it; and a rank that writes down
what it holds of a model until its weights are there, into a file beside its report."""

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from disttrain_trainer import train
from disttrain_trainer.program import run
from disttrain_trainer.runtime.leaving import leave
from disttrain_trainer.runtime.local import local_part
from disttrain_trainer.runtime.stop import StopRequest
from tests.unit.trainer.transformers_code import double_transformers

_MMAP_THRESHOLD = -3
_SELF = Path("/proc/self")


def resident(field: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most."""
    (line,) = [line for line in (_SELF / "status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


@contextmanager
def measured() -> Iterator[SimpleNamespace]:
    """Inside, memory is counted; afterwards `held` of what is yielded is the most that there was besides what there was
    before."""
    # What is freed goes back to the system at once, and is not kept for later.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 65536)
    (_SELF / "clear_refs").write_text("5")
    found, before = SimpleNamespace(held=0), resident("VmRSS")
    yield found
    found.held = resident("VmHWM") - before


def count() -> None:
    # Not the memory of code, which every rank has.
    double_transformers()
    build, opened = train.build_job_state, train.open_checkpoints
    counting = measured()
    found: list[SimpleNamespace] = []

    def built(*arguments: Any) -> Any:
        found.append(counting.__enter__())
        return build(*arguments)

    def loaded(config: Any, world: Any, state: Any, *arguments: Any) -> Any:
        result = opened(config, world, state, *arguments)
        counting.__exit__(None, None, None)
        own = sum(local_part(one).nbytes for one in (*state.module.parameters(), *state.module.buffers()))
        file = Path(os.environ["HELD_MEMORY"], f"rank-{world.rank}.json")
        file.write_text(json.dumps({"held": found[0].held, "own": own}))
        return result

    train.build_job_state, train.open_checkpoints = built, loaded


if __name__ == "__main__":
    count()
    leave(run(StopRequest.on_sigterm()))
