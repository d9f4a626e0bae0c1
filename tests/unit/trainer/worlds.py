"""Worlds of ranks for tests: real processes on the loopback, ended whatever happens.

`launch` starts the trainer as the agent does, for what concerns processes: exit codes, signals, reports.
`run_cases` runs many jobs one after another in one process group (cases.py), for what concerns numbers: starting a
world costs seconds.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from disttrain_api.report import RankReport

ROOT = Path(__file__).parents[3]
WITHIN_SECONDS = 120.0


def job(training: dict[str, Any], uid: str = "uid-1", parallelism: dict[str, Any] | None = None) -> dict[str, Any]:
    """job.json around the `training` of a manifest."""
    return {
        "name": "test",
        "namespace": "default",
        "uid": uid,
        "parallelism": parallelism or {},
        "training": training,
        "checkpointFolder": "test",
    }


def user(function: str, **config: Any) -> dict[str, Any]:
    """Model or data from user_code.py."""
    return {"entrypoint": f"tests.unit.trainer.user_code:{function}", "config": config}


def small(**changes: Any) -> dict[str, Any]:
    """A training that takes no time, with some of its fields changed."""
    return {
        "model": user("double_mlp"),
        "data": user("double_samples"),
        "optimizer": {"name": "SGD", "learningRate": 0.1, "momentum": 0.9},
        "steps": 6,
        "globalBatchSize": 24,
        **changes,
    }


def free_port() -> int:
    """A free port outside the range from which the kernel gives ports to other programs' connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


@dataclass
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str
    report: RankReport | None


@dataclass
class World:
    """Running ranks."""

    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def report(self, rank: int) -> RankReport | None:
        path = self.folder / "reports" / f"rank-{rank}.json"
        return RankReport.model_validate_json(path.read_bytes()) if path.exists() else None

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; fails where a rank ends, or time does, before."""
        deadline = time.monotonic() + WITHIN_SECONDS
        while not condition():
            ended = [process.poll() for process in self.processes]
            assert all(code is None for code in ended), f"ranks ended early: {ended}\n{self.text(0, 'err')}"
            assert time.monotonic() < deadline, f"not within {WITHIN_SECONDS} s"
            time.sleep(0.005)

    def reached(self, step: int, rank: int = 0) -> bool:
        report = self.report(rank)
        return report is not None and report.step >= step

    def text(self, rank: int, stream: str) -> str:
        return (self.folder / f"rank-{rank}.{stream}").read_text()

    def ended(self) -> list[Ended]:
        """Wait for all ranks."""
        return [self._end_of(rank, process) for rank, process in enumerate(self.processes)]

    def _end_of(self, rank: int, process: subprocess.Popen[bytes]) -> Ended:
        try:
            code = process.wait(WITHIN_SECONDS)
        except subprocess.TimeoutExpired:
            codes = [other.poll() for other in self.processes]
            # faulthandler prints every thread's stack.
            process.send_signal(signal.SIGABRT)
            process.wait()
            pytest.fail(f"rank {rank} did not end within {WITHIN_SECONDS} s ({codes}):\n{self.text(rank, 'err')}")
        return Ended(code, self.text(rank, "out"), self.text(rank, "err"), self.report(rank))

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def launch(
    folder: Path,
    config: dict[str, Any] | None,
    ranks: int = 1,
    storage: Path | list[Path] | None = None,
    attempt: int = 1,
    port: int | None = None,
    preexec: Callable[[], None] | None = None,
    module: str = "disttrain_trainer.train",
    **environment: str,
) -> Iterator[World]:
    """Start ranks of `module`. `storage` may be one folder for all or one for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "job.json").write_text(json.dumps(config))
    port = port or free_port()
    world = World(folder)
    try:
        for rank in range(ranks):
            own = storage[rank] if isinstance(storage, list) else storage
            env = {
                **{key: value for key, value in os.environ.items() if not key.startswith("DISTTRAIN_")},
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONFAULTHANDLER": "1",
                "DISTTRAIN_CONFIG": str(folder / "job.json"),
                "DISTTRAIN_ATTEMPT": str(attempt),
                "DISTTRAIN_REPORT_DIR": str(folder / "reports"),
                **({"DISTTRAIN_STORAGE": str(own)} if own else {}),
                **environment,
            }
            world.processes.append(_start(world, rank, module, env, preexec))
        yield world
    finally:
        world.kill()


def _start(
    world: World, rank: int, module: str, env: dict[str, str], preexec: Callable[[], None] | None
) -> subprocess.Popen[bytes]:
    with (world.folder / f"rank-{rank}.out").open("wb") as out, (world.folder / f"rank-{rank}.err").open("wb") as err:
        command = [sys.executable, "-m", module]
        return subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=err, preexec_fn=preexec)  # noqa: PLW1509


def run_cases(folder: Path, ranks: int, cases: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Run each case in one world of `ranks`.

    A case is a list of runs, which share a storage of their own: {"training": ..., and optionally "stop_after": step}.
    Result of a case: "parameters" of the last run, "metrics" (lines of all runs) and "errors" (one or None per run).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    with launch(folder, None, ranks, module="tests.unit.trainer.cases", CASES=str(folder)) as world:
        ended = world.ended()
        assert [rank.code for rank in ended] == [0] * ranks, "\n".join(rank.err for rank in ended)
    return {name: _result(folder / name) for name in cases}


def _result(folder: Path) -> dict[str, Any]:
    result = torch.load(folder / "result.pt", weights_only=False)
    lines = (folder / "test" / "metrics.jsonl").read_text().splitlines()
    return {**result, "metrics": [json.loads(line) for line in lines]}
