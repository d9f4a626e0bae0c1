"""A `disttrain run` that trains until a benchmark ends it, its processes, and what its log says."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import yaml

from benchmarks.local_start import PACKAGES, REPOSITORY

PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.005
TRAINING: dict[str, Any] = {
    "model": {"name": "mlp"},
    "data": {"name": "synthetic", "config": {"kind": "Images", "size": 128}},
    "optimizer": {"name": "SGD", "learningRate": 0.1},
    "steps": 100_000_000,
    "globalBatchSize": 64,
    "logging": {"interval": 10},
}
BEGINS = re.compile(r"resuming after step (\d+) |no checkpoint yet")
"""The line with which the ranks begin a life."""
STEP = re.compile(r" step: (\d+) ")


class Log:
    """What the logs of a run's pods say, as far as they were read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.lives = 0
        """Lives of the ranks that have begun."""
        self.trains = False
        """Whether the last one has logged a step."""
        self.resumed = 0
        """The step after which the last one has begun."""
        self.step = 0
        """The last logged step."""
        self.redone: list[int] = []
        """For each life but the first: logged steps of the life before that it does again."""

    def read(self) -> "Log":
        """Read what is new; returns itself."""
        for log in sorted(self._folder.glob("disttrain-runs/*/logs/*.log")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._take(line)
        return self

    def _take(self, line: str) -> None:
        if (begins := BEGINS.search(line)) is not None:
            self.resumed = int(begins[1] or 0)
            if self.lives:
                # Ranks that go on from a survivor may be further than what was logged.
                self.redone.append(max(0, self.step - self.resumed))
            self.lives, self.trains = self.lives + 1, False
        elif (step := STEP.search(line)) is not None:
            self.step, self.trains = int(step[1]), True


class Job:
    """One job on this machine."""

    def __init__(self, folder: Path, command: Sequence[str], spec: Mapping[str, Any]) -> None:
        manifest = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": {"name": "benchmark"}}
        Path(folder, "job.yaml").write_text(yaml.safe_dump(manifest | {"spec": dict(spec)}))
        paths = os.pathsep.join(str(REPOSITORY / package) for package in PACKAGES)
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.folder, self.log = folder, Log(folder)
        with Path(folder, "output").open("wb") as output:
            self._process = psutil.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def until_training(self, lives: int) -> None:
        """Return when the ranks of so many lives have begun and the last ones have logged a step."""
        self.until(lambda: self.log.read().lives >= lives and self.log.trains, f"life {lives} trains")

    def until(
        self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS, pause: float = POLL_SECONDS
    ) -> None:
        """Return when the condition holds. Raises TimeoutError where it does not in time, or the run has ended."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError(f"not so: {what}\n{Path(self.folder, 'output').read_text()[-2000:]}")
            time.sleep(pause)

    def rank(self, rank: int) -> psutil.Process:
        """The process of a rank."""
        (found,) = (process for process in self.below() if rank_of(process) == str(rank))
        return found

    def agent(self, rank: int) -> psutil.Process:
        """The agent of a rank's pod."""
        parent = self.rank(rank).parent()
        assert parent is not None
        return parent

    def named(self, name: str) -> list[psutil.Process]:
        """Its processes that `ps` shows as this."""
        found = []
        for process in self.below():
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.name() == name else []
        return found

    def status(self) -> dict[str, Any]:
        """As in status.yaml."""
        for path in self.folder.glob("disttrain-runs/*/status.yaml"):
            return dict(yaml.safe_load(path.read_text()).get("status") or {})
        return {}

    def below(self) -> list[psutil.Process]:
        """All processes below the runner; none where it has ended."""
        with suppress(psutil.NoSuchProcess):
            return list(self._process.children(recursive=True))
        return []

    def end(self) -> None:
        """Nothing of it is left."""
        below = self.below()
        with suppress(psutil.NoSuchProcess):
            self._process.kill()
        self._process.wait()
        psutil.wait_procs(below, PATIENCE_SECONDS)


@contextmanager
def running(command: Sequence[str], spec: Mapping[str, Any], files: Sequence[Path] = ()) -> Iterator[Job]:
    """A job in a folder of its own, with these files; it has ended when the block has."""
    with TemporaryDirectory() as folder:
        for file in files:
            shutil.copy(file, folder)
        job = Job(Path(folder), command, spec)
        try:
            yield job
        finally:
            job.end()


def rank_of(process: psutil.Process) -> str | None:
    """The rank that a process is; None for the agent, the zygote and all others."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        name, words = process.name(), process.cmdline()
        if name.startswith("rank "):
            return name.removeprefix("rank ")
        return process.environ().get("RANK") if "disttrain_trainer" in words else None
    return None
