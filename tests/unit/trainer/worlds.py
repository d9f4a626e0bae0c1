"""Worlds of ranks for tests: real processes on the loopback, ended whatever happens.

`launch` starts the trainer as the agent does, for what concerns processes: exit codes, signals, reports.
`run_cases` runs many jobs one after another in one process group (cases.py), for what concerns numbers: starting a
world costs seconds.
"""

import faulthandler
import json
import multiprocessing
import multiprocessing.context
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NoReturn, Protocol

import pytest
import torch

from disttrain_api.manifest import load
from disttrain_api.names import TOKEN_FILE
from disttrain_api.report import RankError, RankReport
from tests.soak import SOAK
from tests.suites import GATE
from tests.waiting import GENEROUS
from tools.cluster.ports import free_port

TOKEN = "the token of the job"
ROOT = Path(__file__).parents[3]
WITHIN_SECONDS = GENEROUS
# Many jobs, of which some compile; where nothing is cached yet that alone can take more than a minute.
CASES_WITHIN_SECONDS = 3000.0 if SOAK else 240.0 if GATE else 1800.0
# A process that hangs in a driver writes none, and does not even die of a signal.
STACKS_WITHIN_SECONDS = 20.0
WORLDS_WITHIN_SECONDS = 6000 if SOAK else 2000
"""Limit of a test whose fixture runs cases in several worlds, one after the other."""


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


def of_example(name: str, **changes: Any) -> dict[str, Any]:
    """The training of an example, with some of its fields changed."""
    training = load(ROOT / "examples" / f"{name}.yaml").spec.training
    described: dict[str, Any] = json.loads(training.model_dump_json(by_alias=True, exclude_none=True))
    return described | changes


class Rank(Protocol):
    """A process; poll and wait as in subprocess, the latter None where time ran out."""

    @property
    def pid(self) -> int: ...
    def poll(self) -> int | None: ...
    def wait(self, seconds: float) -> int | None: ...
    def send_signal(self, number: int) -> None: ...


PRELOADED = [
    "disttrain_trainer.program",
    "disttrain_trainer.data.digits",
    "tensorboard.summary.writer.record_writer",
    # A forked rank is handed a function of this module by a process whose main module is pytest.
    "pytest",
    "tests.unit.trainer.worlds",
]


class ForkedRank:
    """A rank forked from a process that has imported torch already: the import costs seconds, there are many ranks."""

    def __init__(self, environment: dict[str, str], folder: Path, file_size_limit: int | None) -> None:
        arguments = (environment, folder, file_size_limit)
        self._process = _forkserver().Process(target=forked_main, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        # As subprocess does it: a process that has just ended gets no signal.
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


class FreshRank:
    """A rank in an interpreter of its own, as the agent starts it."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        name = f"rank-{environment['RANK']}"
        with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
            command = [sys.executable, "-m", environment["TEST_MODULE"]]
            self._process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=out, stderr=err)
        self.pid = self._process.pid
        self.poll, self.send_signal = self._process.poll, self._process.send_signal

    def wait(self, seconds: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode


def forked_main(environment: dict[str, str], folder: Path, file_size_limit: int | None) -> None:
    """What a forked rank does: become what a fresh one is, then run its module."""
    # It dies with pytest, as a daemon does; but daemons may have no children, and ranks may.
    multiprocessing.current_process().daemon = False
    os.environ.clear()
    os.environ.update(environment)
    # An interpreter reads it when it starts: here that was before the environment was known.
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [path for path in given if path not in sys.path]
    os.chdir(ROOT)
    for descriptor, stream in ((1, "out"), (2, "err")):
        with (folder / f"rank-{environment['RANK']}.{stream}").open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    faulthandler.enable()
    if file_size_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))
    runpy.run_module(environment["TEST_MODULE"], run_name="__main__")


@cache
def _forkserver() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # Read when torch is loaded, and so before a rank's own environment counts.
    loaded = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in loaded.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return context


@dataclass
class Ended:
    """How a rank ended."""

    code: int
    out: str
    err: str
    report: RankReport | None

    @property
    def error(self) -> RankError:
        """Why it failed, as it reports."""
        assert self.report.error is not None
        return self.report.error


def how_they_ended(ranks: Sequence[Ended]) -> str:
    """A line with each rank's code and last line, which is that of the error, and then all that they have printed."""
    last = [(rank.err.strip() or "nothing printed").splitlines()[-1] for rank in ranks]
    line = "; ".join(f"rank {number} ended with {ranks[number].code}: {text}" for number, text in enumerate(last))
    return "\n".join([line, *(rank.err for rank in ranks)])


@dataclass
class World:
    """Running ranks."""

    folder: Path
    processes: list[Rank] = field(default_factory=list)

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

    def ended(
        self, within: float = WITHIN_SECONDS, after_failure: float = WITHIN_SECONDS,
        progress: Callable[[], object] = lambda: None,
    ) -> list[Ended]:  # fmt: skip
        """Wait for all ranks: so many seconds without another answer of `progress`, or `after_failure` of them once one
        has failed, for which others may wait for ever."""
        deadline, failed, seen = time.monotonic() + within, False, progress()
        while running := [process for process in self.processes if process.poll() is None]:
            if not failed and (found := progress()) != seen:
                deadline, seen = time.monotonic() + within, found
            if not failed and any(process.poll() for process in self.processes):
                deadline, failed = min(deadline, time.monotonic() + after_failure), True
            if time.monotonic() > deadline:
                self._fail_with_stacks()
            running[0].wait(1.0)
        return [
            Ended(process.poll(), self.text(rank, "out"), self.text(rank, "err"), self.report(rank))
            for rank, process in enumerate(self.processes)
        ]

    def _fail_with_stacks(self) -> NoReturn:
        codes = [process.poll() for process in self.processes]
        # faulthandler prints every thread's stack. All at once: a rank whose peer is gone says nothing of its wait.
        for process in self.processes:
            process.send_signal(signal.SIGABRT)
        for process in self.processes:
            process.wait(STACKS_WITHIN_SECONDS)
        message = "\n".join(f"rank {rank}:\n{self.text(rank, 'err')}" for rank in range(len(self.processes)))
        pytest.fail(f"not all ranks ended in time ({codes}):\n{message}")

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait(WITHIN_SECONDS)


def first_gpu() -> str:
    """The GPU that all ranks of a test share, also where a machine has several."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


@contextmanager
def launch(
    folder: Path,
    config: dict[str, Any] | None,
    ranks: int = 1,
    storage: Path | list[Path] | None = None,
    attempt: int = 1,
    port: int | None = None,
    file_size_limit: int | None = None,
    module: str = "disttrain_trainer",
    fresh: bool = False,
    device: str = "cpu",
    **environment: str,
) -> Iterator[World]:
    """Start ranks of `module`. `storage` may be one folder for all or one for each rank; `device` is cpu or cuda."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "job.json").write_text(json.dumps(config))
        (folder / TOKEN_FILE).write_text(TOKEN)
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
                "TEST_MODULE": module,
                "DISTTRAIN_CONFIG": str(folder / "job.json"),
                "DISTTRAIN_ATTEMPT": str(attempt),
                "DISTTRAIN_REPORT_DIR": str(folder / "reports"),
                **({"DISTTRAIN_STORAGE": str(own)} if own else {}),
                "CUDA_VISIBLE_DEVICES": "" if device == "cpu" else first_gpu(),
                **environment,
            }
            # CUDA starts in fresh processes only.
            own_interpreter = fresh or device == "cuda"
            rank_process = FreshRank(env, folder) if own_interpreter else ForkedRank(env, folder, file_size_limit)
            world.processes.append(rank_process)
        yield world
    finally:
        world.kill()


def run_ranks(folder: Path, config: dict[str, Any] | None, *args: Any, **options: Any) -> list[Ended]:
    """Start ranks as `launch` does, and wait for their end."""
    with launch(folder, config, *args, **options) as world:
        return world.ended()


@dataclass(frozen=True)
class Patience:
    """How long a world of cases may take."""

    seconds: float = CASES_WITHIN_SECONDS
    """For all cases."""
    of_one: bool = False
    """Whether that is for each case, of which the first one has the start of the world besides."""
    after_failure: float = WITHIN_SECONDS
    """For the other ranks, once one has failed."""

    def wait_for(self, world: World, done: Callable[[], object]) -> list[Ended]:
        """The ranks' ends. done: the cases that are."""
        return world.ended(self.seconds, self.after_failure, done if self.of_one else lambda: None)


def run_cases(
    folder: Path, ranks: int, cases: dict[str, list[dict[str, Any]]], patience: Patience | None = None,
    module: str = "tests.unit.trainer.cases", **options: Any,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Run each case in one world of `ranks`; options are those of `launch`. Where it fails, see `finished_cases`.

    A case is a list of runs, which share a storage of their own: {"training": ..., and optionally "stop_after": step,
    or "ask_after": step, when the last rank is asked for a checkpoint}.
    Result of a case: "parameters" of the last run and "gradients" of its first step, "metrics" (lines of all runs),
    "errors" (one or None per run), "scale" (of the loss), "fused" (of each group of the optimizer, whether one kernel
    updates it), "began" (of each run, the report before its first step), "held" (where the parameters were) and "saved"
    (steps of the checkpoints that there are).
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cases.json").write_text(json.dumps(cases))
    with launch(folder, None, ranks, module=module, CASES=str(folder), **options) as world:
        ended = (patience or Patience()).wait_for(world, lambda: [_is_finished(folder / name) for name in cases])
        assert [rank.code for rank in ended] == [0] * ranks, how_they_ended(ended)
    return {name: _result(folder / name) for name in cases}


def finished_cases(folder: Path, cases: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The results of those cases that have one, of a world of `run_cases` that may have failed."""
    return {name: _result(folder / name) for name in cases if _is_finished(folder / name)}


def run_layouts(
    folders: pytest.TempPathFactory, trainings: dict[str, Any], layouts: dict[str, tuple[int, str, Any, Any]]
) -> dict[str, dict[str, Any]]:
    """Run each layout as a case, those of equally many ranks in one world.

    layouts: ranks, name of the training, parallelism, changes of the training, by name.
    """
    results = {}
    for world in sorted({ranks for ranks, *_ in layouts.values()}):
        cases = {
            name: [{"training": {**trainings[training], **changes}, "parallelism": parallelism}]
            for name, (ranks, training, parallelism, changes) in layouts.items()
            if ranks == world
        }
        results |= run_cases(folders.mktemp(f"world-of-{world}"), world, cases)
    return results


def _is_finished(folder: Path) -> bool:
    return (folder / "result.pt").exists()


def _result(folder: Path) -> dict[str, Any]:
    result = torch.load(folder / "result.pt", map_location="cpu", weights_only=False)
    file = folder / "test" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {**result, "metrics": [json.loads(line) for line in lines]}
