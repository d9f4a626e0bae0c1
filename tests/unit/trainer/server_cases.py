"""Ranks that run many small jobs whose parameters lie on servers; the last rank is all servers. See `run_server_cases`.

A case is a list of runs, as in worlds.run_cases, each with "servers" (how many, 1 by default), "settings" of the
servers and "dataParallel" (what stands beside them). Every run has servers of its own, as every attempt of a job has.
With several ranks per pod the ranks of a pod are one worker in every run.
"""

import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from disttrain_api.jobconfig import JobConfig
from disttrain_api.parallelism import ParameterServer
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.parameter_server.protocol import buckets
from disttrain_trainer.parameter_server.protocol.settings import workers_of
from disttrain_trainer.parameter_server.protocol.wire import key_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.worker.group import in_group
from disttrain_trainer.program import take_part
from disttrain_trainer.runtime.config import Config, resolve
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.errors import TrainerError
from disttrain_trainer.runtime.mesh import World, join_world
from tests.unit.trainer.cases import StopAfter, in_layout, of_all_ranks, whole
from tests.unit.trainer.worlds import Patience, how_they_ended, job, launch, small
from tools.cluster.ports import free_port

TOKEN = "a-token"


def run_server_cases(
    folder: Path, ranks: int, cases: dict[str, list[dict[str, Any]]], ranks_per_pod: int = 1, device: str = "cpu",
    patience: Patience | None = None,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Run each case with so many ranks of workers, whose models are on `device`.

    Result of a case: "errors" of each rank and run, "parameters" of the leader after the last run, "metrics".
    """
    folder.mkdir(parents=True, exist_ok=True)
    ports: set[int] = set()
    for run in (run for runs in cases.values() for run in runs):
        wanted = run.get("servers", 1) + len(ports)
        own: list[int] = []
        while len(ports) < wanted:
            port = free_port()
            own += [] if port in ports else [port]
            ports.add(port)
        run["addresses"] = [f"127.0.0.1:{port}" for port in own]
    (folder / "cases.json").write_text(json.dumps(cases))
    environment = {"CASES": str(folder), "LOCAL_WORLD_SIZE": str(ranks_per_pod)}
    with launch(
        folder, None, ranks + 1, module="tests.unit.trainer.server_cases", device=device, **environment
    ) as world:
        ended = (patience or Patience()).wait_for(world, lambda: [_is_finished(folder / name, ranks) for name in cases])
        assert [rank.code for rank in ended] == [0] * (ranks + 1), how_they_ended(ended)
    return {name: _result(folder / name, ranks) for name in cases}


def finished_server_cases(folder: Path, ranks: int, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results of those cases that have one, of a world of `run_server_cases` that may have failed."""
    return {name: _result(folder / name, ranks) for name in cases if _is_finished(folder / name, ranks)}


def _is_finished(folder: Path, ranks: int) -> bool:
    return all((folder / f"result-{rank}.pt").exists() for rank in range(ranks))


def _result(folder: Path, ranks: int) -> dict[str, Any]:
    file = folder / "test" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    results = [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {
        "errors": [result["errors"] for result in results],
        "parameters": results[0]["parameters"],
        "metrics": [json.loads(line) for line in lines],
    }


def config_of(folder: Path, run: dict[str, Any], attempt: int, ranks: int) -> Config:
    in_pod, rank = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["RANK"])
    groups = {"groupReduce": "WithinGroup"} if in_pod > 1 else {}
    settings = {
        "mode": "ParameterServer",
        "parameterServer": {**groups, **run.get("settings", {})},
        **run.get("dataParallel", {}),
    }
    parallelism = {**run.get("parallelism", {}), "dataParallel": settings}
    parsed = JobConfig.model_validate(job(run["training"], parallelism=parallelism))
    mesh, batch = resolve(parsed, ranks, in_pod)
    return Config(
        job=parsed,
        mesh=mesh,
        batch=batch,
        rank=rank,
        world_size=ranks,
        local_world_size=in_pod,
        attempt=attempt,
        checkpoint_folder=folder / "test",
        metrics_folder=folder / "test",
        report_dir=Path(os.environ["CASES"]) / f"pod-{rank // in_pod}",
        servers=tuple(run["addresses"]),
        token=TOKEN,
    )


def serve_all(folder: Path, cases: dict[str, list[dict[str, Any]]], ranks: int) -> None:
    """A thread per server, until every rank has run all cases."""
    for name, runs in cases.items():
        for attempt, run in enumerate(runs, start=1):
            config = config_of(folder / name, run, attempt, ranks)
            settings = config.job.parallelism.data_parallel.parameter_server or ParameterServer()
            for index, address in enumerate(config.servers):
                compression = config.job.parallelism.data_parallel.compression
                described = ServerConfig(
                    index, workers_of(config), config.training, config.batch, settings, compression=compression
                )
                server = Server(described)
                loop = Loop(server, key_of(TOKEN, config.job.uid, attempt), address)
                threading.Thread(target=loop.run, args=(lambda: False,), daemon=True).start()
    while not all((folder / f"done-{rank}").exists() for rank in range(ranks)):
        time.sleep(0.05)


def run_case(folder: Path, runs: list[dict[str, Any]], world: World, ranks: int) -> None:
    errors: list[str | None] = []
    parameters: dict[str, torch.Tensor] = {}
    for attempt, run in enumerate(runs, start=1):
        stop = StopAfter(run.get("stop_after"))
        try:
            config = config_of(folder, run, attempt, ranks)
            state = take_part(config, in_layout(world, in_group(config)), Reporter(config.rank, None), stop)
        except TrainerError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append(None)
            parts = of_all_ranks(
                {name: whole(value) for name, value in state.module.state_dict().items()},
                folder / f"pod-{int(os.environ['RANK']) // int(os.environ['LOCAL_WORLD_SIZE'])}",
                world,
            )
            parameters = {name: value for part in reversed(parts) for name, value in part.items()}
    folder.mkdir(exist_ok=True)
    own = f"{os.environ['RANK']}.pt"
    torch.save({"errors": errors, "parameters": parameters}, folder / f"unfinished-{own}")
    (folder / f"unfinished-{own}").rename(folder / f"result-{own}")


def main() -> None:
    folder = Path(os.environ["CASES"])
    cases = json.loads((folder / "cases.json").read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    # So that these small models, too, come and go in several parts.
    buckets.BUCKET_BYTES = 64
    if rank == ranks:
        serve_all(folder, cases, ranks)
        os._exit(0)
    try:
        # Whatever the first case does without: with a group for saves in the background.
        first = config_of(folder, {**next(iter(cases.values()))[0], "training": small()}, 1, ranks)
        # The ranks of a pod may share a GPU, and are no NCCL world then; those of several pods are worlds of their own.
        in_pod = first.local_world_size
        world = join_world(in_group(first), find_device(rank % in_pod, in_pod, threads_given=True))
        for name, runs in cases.items():
            run_case(folder / name, runs, world, ranks)
        world.leave()
    finally:
        # Also of a rank that fails: else the servers would wait for it, and the test for them.
        (folder / f"done-{rank}").touch()
    os._exit(0)


if __name__ == "__main__":
    main()
