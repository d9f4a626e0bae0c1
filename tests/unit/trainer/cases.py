"""A rank that runs many small jobs in one process group; see worlds.run_cases."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from disttrain_agent.checkpoint_request import checkpoint_request_file
from disttrain_api.jobconfig import JobConfig
from disttrain_api.mesh import Mesh
from disttrain_api.pipeline import output_index
from disttrain_api.report import RankReport
from disttrain_trainer.checkpoint.compatibility import extra_state_in
from disttrain_trainer.checkpoint.storage import StepFolders
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.optim import optimizers
from disttrain_trainer.runtime.config import Config, resolve
from disttrain_trainer.runtime.device import Device, find_device
from disttrain_trainer.runtime.errors import TrainerError
from disttrain_trainer.runtime.mesh import World, context_group_of, device_mesh_of, join_world
from disttrain_trainer.runtime.stop import StopRequest
from disttrain_trainer.train import train
from tests.unit.trainer.worlds import TOKEN, job, small


class StopAfter(StopRequest):
    """A stop that comes after so many steps of a run; each step asks once."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self.left = steps

    @property
    def requested(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


class AskAfter(StopRequest):
    """No stop, but after so many steps of a run this rank is asked for a checkpoint."""

    def __init__(self, steps: int, folder: Path) -> None:
        super().__init__()
        self._left, self._file = steps, checkpoint_request_file(folder)

    @property
    def requested(self) -> bool:
        self._left -= 1
        if self._left == -1:
            os.utime(self._file, ns=(1, 1))
        return False


class Recorded(Reporter):
    """Keeps the report with which this rank began to take steps."""

    first: RankReport | None = None

    def follow(self, step: Callable[[], int]) -> None:
        super().follow(step)
        self.first = self.report


def config_of(folder: Path, run: dict[str, Any], attempt: int) -> Config:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    parsed = JobConfig.model_validate(job(run["training"], parallelism=run.get("parallelism")))
    # Tensor groups that overlap have to be within a pod.
    in_pod = run.get("ranks_per_pod", size if parsed.parallelism.async_tensor_parallel else 1)
    mesh, batch = resolve(parsed, size, in_pod)
    return Config(
        job=parsed,
        mesh=mesh,
        batch=batch,
        rank=rank,
        world_size=size,
        local_world_size=in_pod,
        master=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        attempt=attempt,
        token=TOKEN,
        checkpoint_folder=folder / "test",
        metrics_folder=folder / "test",
        # A pod for each rank: one that is asked says so to the others in a step that is always the same.
        report_dir=folder / f"reports-{rank}",
    )


def in_layout(world: World, config: Config) -> World:
    """The same ranks in the layout of the config."""
    device_mesh, context = _groups_of(config.mesh, world.device)
    output = output_index(config.job.parallelism)
    return replace(world, mesh=config.mesh, device_mesh=device_mesh, output_index=output, context=context)


@cache
def _groups_of(mesh: Mesh, device: Device) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Made once for all cases of a layout: each group has threads and connections that live as long as the rank."""
    return device_mesh_of(mesh, device), context_group_of(mesh)


def whole(value: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, whoever holds its parts."""
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value.cpu().clone()


@contextmanager
def first_gradients() -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """The gradient of each parameter that the optimizer is given first: summed over the ranks, and clipped."""
    found: dict[nn.Parameter, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter not in found:
                    found[parameter] = parameter.grad.detach().clone()

    handle = register_optimizer_step_pre_hook(keep)
    try:
        yield found
    finally:
        handle.remove()


def of_all_ranks(own: dict[str, torch.Tensor], folder: Path, world: World) -> list[dict[str, torch.Tensor]]:
    """The tensors of each rank, on every rank, by files in a folder that all see."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(own, folder / f"own-{world.rank}.pt")
    dist.barrier()
    parts = [torch.load(folder / f"own-{rank}.pt") for rank in range(world.size)]
    dist.barrier()
    return parts


def of_the_whole_model(
    own: dict[str, torch.Tensor], config: Config, folder: Path, world: World
) -> dict[str, torch.Tensor]:
    """By parameter name; the ranks of a pipeline hold different ones."""
    parts = of_all_ranks(own, folder, world) if config.mesh.pipeline > 1 else [own]
    return {name: value for part in parts for name, value in part.items()}


def place_of(value: torch.Tensor) -> str:
    """The kind of device that holds a parameter, or "pinned"."""
    own = value.to_local() if isinstance(value, DTensor) else value
    return "pinned" if own.is_pinned() else own.device.type


def run_case(folder: Path, runs: list[dict[str, Any]], world: World) -> None:
    errors: list[str | None] = []
    parameters: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}
    figures: dict[str, Any] = {}
    began: list[RankReport | None] = []
    for attempt, run in enumerate(runs, start=1):
        stop: StopRequest = StopAfter(run.get("stop_after"))
        if "ask_after" in run and world.rank == world.size - 1:
            stop = AskAfter(run["ask_after"], folder / f"reports-{world.rank}")
        reporter = Recorded(world.rank, folder / f"reports-{world.rank}")
        try:
            config = config_of(folder, run, attempt)
            with first_gradients() as first:
                state = train(config, in_layout(world, config), reporter, stop)
        except TrainerError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append(None)
            held = state.module.state_dict()
            own = {name: whole(held[name]) for name in held.keys() - set(extra_state_in(held))}
            parameters = of_the_whole_model(own, config, folder, world)
            named = state.module.named_parameters(remove_duplicate=False)
            own = {name: whole(first[parameter]) for name, parameter in named if parameter in first}
            gradients = of_the_whole_model(own, config, folder, world)
            figures = {
                "scale": state.precision.scaler.scale if state.precision.scaler else 1.0,
                "fused": [bool(group.get("fused")) for group in state.optimizer.param_groups],
                "held": {place_of(parameter.detach()) for parameter in state.parameters},
                "saved": StepFolders(folder / "test").complete(),
                "searches": getattr(state.model, "find_unused_parameters", None),
            }
        began.append(reporter.first)
    if world.first:
        folder.mkdir(exist_ok=True)
        held = {"parameters": parameters, "gradients": gradients}
        result = {"errors": errors, **held, "report": reporter.report, "began": began, **figures}
        # Whole or not there: who finds the world dead takes what it has.
        torch.save(result, folder / "unfinished.pt")
        (folder / "unfinished.pt").rename(folder / "result.pt")


def main() -> None:
    folder = Path(os.environ["CASES"])
    cases = json.loads((folder / "cases.json").read_text())
    # Only its number of ranks counts, which may be any.
    first = config_of(folder, {"training": small(globalBatchSize=int(os.environ["WORLD_SIZE"]))}, 1)
    if "SINGLE_LOOPS" in os.environ:
        optimizers.fuses_updates = lambda device: False
    world = join_world(first, find_device(first.rank, first.world_size, threads_given=True))
    for name, runs in cases.items():
        run_case(folder / name, runs, world)
    world.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
