"""How long a job of two ranks takes to train again after a rank or a pod was lost; ranks on gloo, on this machine.

From SIGKILL of rank 1, or of its pod's agent and so of the pod, to the first step that the ranks log after it, with
`restartStrategy: InPlace`, beside the same job with Recreate in the same run; and how many logged steps are done again:
none where ranks go on from the memory of the one that has survived.
As programs: every process imports for itself, as in a pod of a cluster, and ranks that start again in place are forks
of the zygote. Without the zygote: it is killed before the rank is. Forked: as `disttrain run` does it, whose processes
are all forks. The ranks are of one pod or, where it says so, of two. A lost pod is recreated alone. No pod is scheduled
and no image pulled here: that adds to Recreate, and to a lost pod.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from benchmarks import harness
from benchmarks.local_job import TRAINING, Job, running
from benchmarks.local_start import APART, DISTTRAIN

RANKS = 2
VICTIM = 1
INTERVAL = 500
"""Steps between checkpoints. A kill comes after one and a half of them."""


class Recoveries(NamedTuple):
    """Figures of each kill."""

    seconds: list[float]
    """Until the next logged step."""
    redone: list[float]
    """Logged steps that are done again."""


def spec(strategy: str, pods: int) -> dict[str, Any]:
    return {
        "workers": {"replicas": pods, "processesPerPod": RANKS // pods},
        "storage": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Gi"}}}}},
        "training": TRAINING | {"checkpoint": {"interval": INTERVAL, "keepLatest": 2}},
        "runPolicy": {"restartStrategy": strategy, "maxRestarts": 1000, "restartBackoffSeconds": 0},
    }


def recoveries(
    command: list[str], strategy: str, kills: int, *, zygote: bool | None = None, pods: int = 1, lost: bool = False
) -> Recoveries:
    """What follows each kill. zygote: whether it is there; None: there is none to wait for. lost: kill a pod, where
    there has been a checkpoint since it was lost last, as otherwise the gang is recreated."""
    taken: list[float] = []
    with running(command, spec(strategy, pods)) as job:
        job.until_training(1)
        for kill in range(kills):
            if zygote is not None and (zygote or kill == 0):
                for process in zygotes(job, pods):
                    if not zygote:
                        process.kill()
                        process.wait()
            job.until(lambda: job.log.read().step >= job.log.resumed + 1.5 * INTERVAL, "it has come to a checkpoint")
            if lost:
                job.until(lambda: has_new_checkpoint(job), "there is a checkpoint since the last loss")
            victim = job.agent(VICTIM) if lost else job.rank(VICTIM)
            victim.kill()
            began = time.perf_counter()
            job.until_training(kill + 2)
            taken.append(time.perf_counter() - began)
        return Recoveries(taken, [float(steps) for steps in job.log.redone])


def zygotes(job: Job, pods: int) -> list[Any]:
    """The zygote of each pod, once all are ready."""
    job.until(lambda: len(job.named("zygote")) == pods, "the zygotes are ready")
    return job.named("zygote")


def has_new_checkpoint(job: Job) -> bool:
    """Whether the status has a checkpoint that is newer than the last loss of a pod."""
    status = job.status()
    lost = [entry["checkpointStep"] for entry in status["attempts"][-1].get("replacements", [])]
    return "checkpoint" in status and status["checkpoint"]["step"] > max(lost, default=0)


def measure(quick: bool) -> Iterator[harness.Row]:
    kills, recreations = (1, 1) if quick else (20, 10)
    if not quick:
        recreated = recoveries(APART, "Recreate", recreations)
        yield from _rows("in place, programs", recoveries(APART, "InPlace", kills, zygote=True), recreated)
        without = recoveries(APART, "InPlace", recreations, zygote=False)
        yield from _rows("in place, programs, no zygote", without, recreated)
    recreated = recoveries(DISTTRAIN, "Recreate", recreations)
    yield from _rows("in place, forked", recoveries(DISTTRAIN, "InPlace", kills), recreated)
    recreated = recoveries(APART, "Recreate", recreations, pods=2)
    in_place = recoveries(APART, "InPlace", kills, zygote=True, pods=2)
    yield from _rows("in place, programs, two pods", in_place, recreated)
    recreated = recoveries(APART, "Recreate", recreations, pods=2, lost=True)
    replaced = recoveries(APART, "InPlace", kills, zygote=True, pods=2, lost=True)
    yield from _rows("a pod of two lost, programs", replaced, recreated)


def _rows(name: str, in_place: Recoveries, recreated: Recoveries) -> Iterator[harness.Row]:
    """The rows of ranks that are started so, with those of the recreated attempts as reference."""
    yield harness.row(name, "s", in_place.seconds, recreated.seconds)
    if len(in_place.seconds) > 1:
        seconds = in_place.seconds
        yield harness.Row(f"{name}, p95", p95(seconds), "s", p95(recreated.seconds), len(seconds))
    yield harness.row(f"{name}, steps redone", "steps", in_place.redone, recreated.redone)


def p95(values: list[float]) -> float:
    """What 95 of 100 such values stay below; of a single one, itself."""
    return values[0] if len(values) == 1 else statistics.quantiles(values, n=20, method="inclusive")[-1]


if __name__ == "__main__":
    harness.main(__doc__, measure, packages=("torch",))
