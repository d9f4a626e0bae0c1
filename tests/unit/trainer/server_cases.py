"""Ranks that run many small jobs whose parameters lie on servers; the last rank is all servers. See `run_server_cases`.

A case is a list of runs, as in worlds.run_cases, each with "servers" (how many, 1 by default), "settings" of the
servers and "dataParallel" (what stands beside them). Every run has servers of
its own, as every attempt of a job has.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from disttrain_api.jobconfig import JobConfig
from disttrain_api.parallelism import ParameterServer
from disttrain_trainer.config import Config, resolve
from disttrain_trainer.device import find_device
from disttrain_trainer.errors import TrainerError
from disttrain_trainer.mesh import World, join_world
from disttrain_trainer.parameter_server import pushing
from disttrain_trainer.parameter_server.serve import Loop
from disttrain_trainer.parameter_server.server import Server
from disttrain_trainer.parameter_server.settings import ServerConfig
from disttrain_trainer.parameter_server.wire import key_of
from disttrain_trainer.parameter_server.work import alone, work
from disttrain_trainer.report import Reporter
from tests.unit.trainer.cases import StopAfter
from tests.unit.trainer.worlds import free_port, job, launch

TOKEN = "a-token"


def run_server_cases(folder: Path, workers: int, cases: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Run each case with so many workers.

    Result of a case: "errors" of each worker and run, "parameters" of the leader after the last run, "metrics".
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
    with launch(folder, None, workers + 1, module="tests.unit.trainer.server_cases", CASES=str(folder)) as world:
        ended = world.ended()
        assert [rank.code for rank in ended] == [0] * (workers + 1), "\n".join(rank.err for rank in ended)
    return {name: _result(folder / name, workers) for name in cases}


def _result(folder: Path, workers: int) -> dict[str, Any]:
    file = folder / "test" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    results = [torch.load(folder / f"result-{rank}.pt", weights_only=False) for rank in range(workers)]
    return {
        "errors": [result["errors"] for result in results],
        "parameters": results[0]["parameters"],
        "metrics": [json.loads(line) for line in lines],
    }


def config_of(folder: Path, run: dict[str, Any], attempt: int, workers: int) -> Config:
    settings = {
        "mode": "ParameterServer", "parameterServer": run.get("settings", {}), **run.get("dataParallel", {})
    }  # fmt: skip
    parsed = JobConfig.model_validate(job(run["training"], parallelism={"dataParallel": settings}))
    mesh, batch = resolve(parsed, workers)
    return Config(
        job=parsed,
        mesh=mesh,
        batch=batch,
        rank=int(os.environ["RANK"]),
        world_size=workers,
        attempt=attempt,
        checkpoint_folder=folder / "test",
        metrics_folder=folder / "test",
        servers=tuple(run["addresses"]),
        token=TOKEN,
    )


def serve_all(folder: Path, cases: dict[str, list[dict[str, Any]]], workers: int) -> None:
    """A thread per server, until every worker has run all cases."""
    for name, runs in cases.items():
        for attempt, run in enumerate(runs, start=1):
            config = config_of(folder / name, run, attempt, workers)
            settings = config.job.parallelism.data_parallel.parameter_server or ParameterServer()
            for index, address in enumerate(config.servers):
                compression = config.job.parallelism.data_parallel.compression
                described = ServerConfig(
                    index, workers, config.training, config.batch, settings, compression=compression
                )
                server = Server(described)
                loop = Loop(server, key_of(TOKEN, config.job.uid, attempt), address)
                threading.Thread(target=loop.run, args=(lambda: False,), daemon=True).start()
    while not all((folder / f"done-{rank}").exists() for rank in range(workers)):
        time.sleep(0.05)


def run_case(folder: Path, runs: list[dict[str, Any]], world: World, workers: int) -> None:
    errors: list[str | None] = []
    parameters: dict[str, torch.Tensor] = {}
    for attempt, run in enumerate(runs, start=1):
        stop = StopAfter(run.get("stop_after"))
        try:
            config = config_of(folder, run, attempt, workers)
            state = work(config, world, Reporter(config.rank, None), stop)
        except TrainerError as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append(None)
            parameters = {name: value.clone() for name, value in state.module.state_dict().items()}
    folder.mkdir(exist_ok=True)
    torch.save({"errors": errors, "parameters": parameters}, folder / f"result-{os.environ['RANK']}.pt")


def main() -> None:
    folder = Path(os.environ["CASES"])
    cases = json.loads((folder / "cases.json").read_text())
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    if rank == workers:
        serve_all(folder, cases, workers)
        os._exit(0)
    # So that these small gradients, too, are sent in several parts.
    pushing.BUCKET_BYTES = 64
    first = config_of(folder, next(iter(cases.values()))[0], 1, workers)
    world = join_world(alone(first), find_device(0, 1, threads_given=True))
    for name, runs in cases.items():
        run_case(folder / name, runs, world, workers)
    (folder / f"done-{rank}").touch()
    os._exit(0)


if __name__ == "__main__":
    main()
