"""Traces of chosen steps, and what GPU memory was used for when it ran out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch.profiler import profile, schedule

from disttrain_api.training import Profiling
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World

FOLDER = "profile"


class Profiler:
    """`step` after each step of training; traces are written as soon as their last step is done."""

    def __init__(self, traced: profile | None) -> None:
        self._traced = traced

    def step(self) -> None:
        if self._traced is not None:
            self._traced.step()


@contextmanager
def profiling(settings: Profiling | None, world: World, folder: Path | None, step: int) -> Iterator[Profiler]:
    """The profiler of a run that goes on after `step`; without settings it does nothing.

    Writes profile/rank-R-step-N.json (N the first traced step), and profile/rank-R-memory.pickle when a GPU is full.
    Raises InvalidConfiguration where there is no folder.
    """
    if settings is None:
        yield Profiler(None)
        return
    if folder is None:
        raise InvalidConfiguration("`training.profiling` needs a volume in `spec.storage`, where traces can lie")
    target = folder / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    snapshot = target / f"rank-{world.rank}-memory.pickle"
    with world.device.snapshot_when_full(snapshot) if settings.memory_snapshot else nullcontext():
        # One step is traced and thrown away: the first one pays for the start of the tracing.
        waiting = settings.first_step - 2 - step
        if waiting < 0 or not (settings.all_ranks or world.first):
            yield Profiler(None)
            return
        name = f"rank-{world.rank}-step-{settings.first_step}.json"
        with profile(
            activities=world.device.activities,
            schedule=schedule(wait=waiting, warmup=1, active=settings.steps, repeat=1),
            on_trace_ready=lambda traced: traced.export_chrome_trace(str(target / name)),
            record_shapes=True,
            profile_memory=True,
        ) as traced:
            yield Profiler(traced)
