"""How long a job of two ranks takes to train again after one of them was killed; ranks on gloo, on this machine.

From SIGKILL of the rank to the first step that the ranks log after it, with `restartStrategy: InPlace`, beside the
same job with Recreate. As programs: every process imports for itself, as in a pod of a cluster, and ranks that start
again in place are forks of the zygote. Without the zygote: it is killed before the rank is. Forked: as `disttrain run`
does it, whose processes are all forks. The ranks are of one pod or, where it says so, of two. No pod is scheduled and
no image pulled here: that adds to Recreate alone.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import harness
from benchmarks.local_start import APART, DISTTRAIN, PACKAGES

PATIENCE_SECONDS = 120.0
POLL_SECONDS = 0.005
RANKS = 2
TRAINING = {
    "model": {"name": "mlp"},
    "data": {"name": "synthetic", "config": {"kind": "Images", "size": 128}},
    "optimizer": {"name": "SGD", "learningRate": 0.1},
    "steps": 100_000_000,
    "globalBatchSize": 64,
    "checkpoint": {"interval": 500, "keepLatest": 2},
    "logging": {"interval": 10},
}
_BEGINS = ("resuming after step", "no checkpoint yet")


class Job:
    """A `disttrain run` that trains until it is ended."""

    def __init__(self, folder: Path, command: list[str], strategy: str, pods: int) -> None:
        spec = {
            "workers": {"replicas": pods, "processesPerPod": RANKS // pods},
            "storage": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Gi"}}}}},
            "training": TRAINING,
            "runPolicy": {"restartStrategy": strategy, "maxRestarts": 1000, "restartBackoffSeconds": 0},
        }
        manifest = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": {"name": "recovery"}}
        Path(folder, "job.yaml").write_text(yaml.safe_dump(manifest | {"spec": spec}))
        paths = os.pathsep.join(str(REPOSITORY / package) for package in PACKAGES)
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._folder, self._pods = folder, pods
        self._read: dict[Path, int] = {}
        self._lives = self._trains = 0
        with Path(folder, "output").open("wb") as output:
            self._process = psutil.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def until_training(self, lives: int) -> None:
        """Return when the ranks of so many lives have begun and the last ones have logged a step."""
        self._until(lambda: self._lives_that_train() >= lives, f"life {lives} trains")

    def kill_a_rank(self) -> float:
        """SIGKILL to rank 1; returns when."""
        victims = [process for process in self._below() if _rank_of(process) == "1"]
        assert len(victims) == 1, victims
        victims[0].send_signal(signal.SIGKILL)
        return time.perf_counter()

    def zygotes(self) -> list[psutil.Process]:
        """The zygote of each pod, once all are ready."""
        self._until(lambda: len(self._named("zygote")) == self._pods, "the zygotes are ready")
        return self._named("zygote")

    def end(self) -> None:
        """Nothing of it is left."""
        below = self._below()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(below, PATIENCE_SECONDS)

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError(f"not so: {what}\n{Path(self._folder, 'output').read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)

    def _lives_that_train(self) -> int:
        """The last life of the ranks that has logged a step, from 1."""
        for log in sorted(self._folder.glob("disttrain-runs/*/logs/*.log")):
            with log.open("rb") as file:
                file.seek(self._read.get(log, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[log] = self._read.get(log, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if any(words in line for words in _BEGINS):
                    self._lives += 1
                elif " step: " in line:
                    self._trains = self._lives
        return self._trains

    def _below(self) -> list[psutil.Process]:
        return list(self._process.children(recursive=True))

    def _named(self, name: str) -> list[psutil.Process]:
        found = []
        for process in self._below():
            with suppress(psutil.NoSuchProcess):
                found += [process] if process.name() == name else []
        return found


def _rank_of(process: psutil.Process) -> str | None:
    """The rank that a process is; None for the agent, the zygote and all others."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        name, words = process.name(), process.cmdline()
        if name.startswith("rank "):
            return name.removeprefix("rank ")
        return process.environ().get("RANK") if "disttrain_trainer" in words else None
    return None


def recoveries(
    command: list[str], strategy: str, kills: int, *, zygote: bool | None = None, pods: int = 1
) -> list[float]:
    """Seconds from each kill to the next logged step. zygote: whether it is there; None: there is none to wait for."""
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), command, strategy, pods)
        try:
            job.until_training(1)
            for kill in range(kills):
                if zygote is not None and (zygote or kill == 0):
                    for process in job.zygotes():
                        if not zygote:
                            process.kill()
                            process.wait()
                began = job.kill_a_rank()
                job.until_training(kill + 2)
                taken.append(time.perf_counter() - began)
        finally:
            job.end()
    return taken


def measure(quick: bool) -> Iterator[harness.Row]:
    kills = 2 if quick else 10
    recreated = recoveries(APART, "Recreate", kills)
    yield from _rows("programs", recoveries(APART, "InPlace", kills, zygote=True), recreated)
    yield from _rows("programs, no zygote", recoveries(APART, "InPlace", kills, zygote=False), recreated)
    yield from _rows("forked", recoveries(DISTTRAIN, "InPlace", kills), recoveries(DISTTRAIN, "Recreate", kills))
    recreated = recoveries(APART, "Recreate", kills, pods=2)
    yield from _rows("programs, two pods", recoveries(APART, "InPlace", kills, zygote=True, pods=2), recreated)


def _rows(name: str, in_place: list[float], recreated: list[float]) -> Iterator[harness.Row]:
    """The rows of ranks that are started so, with those of the recreated attempts as reference."""
    yield harness.row(f"in place, {name}", "s", in_place, recreated)
    yield harness.Row(f"in place, {name}, p95", _p95(in_place), "s", _p95(recreated), len(in_place))


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


if __name__ == "__main__":
    harness.main(__doc__, measure, packages=("torch",))
