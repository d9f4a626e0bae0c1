"""One real hour of a job without a hang and without a slow rank: no alarm. A local run of two pods with two ranks each.

Between its steps the job evaluates and saves; amid steps all of its ranks compile, or one of them does, or one reads a
sample for seconds. From outside the first, the second or both pods are frozen with their agents (SIGSTOP) and go on
(SIGCONT), as a machine is that stands still. Counted are the conditions HangSuspected and Straggling, restarts in place
and of the gang: each would be an alarm without a cause. Then a rank is stopped alone: an alarm with one.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / package) for package in ("api", "operator", "trainer_image"))]

from benchmarks import busy_code, harness
from benchmarks.local_job import Job, running
from benchmarks.local_start import DISTTRAIN

MINUTES, QUICK_MINUTES = 60, 3
PODS, RANKS_PER_POD = 2, 2
FROZEN_SECONDS, ALL_FROZEN_SECONDS, BETWEEN_SECONDS = (1.0, 40.0), (1.0, 150.0), (10.0, 90.0)
"""A pod that is frozen alone for longer is lost by right: its agent is silent, and the others wait for it."""
LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 120.0
SPEC: dict[str, Any] = {
    "workers": {"replicas": PODS, "processesPerPod": RANKS_PER_POD},
    "storage": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "1Gi"}}}}},
    "training": {
        "model": {"entrypoint": "busy_code:model"},
        "data": {"entrypoint": "busy_code:data"},
        "steps": 100_000_000,
        "microBatchSize": 4,
        "logging": {"interval": 5},
        "evaluation": {"interval": 230},
        "checkpoint": {"interval": 90, "asynchronous": False},
    },
    "runPolicy": {"restartStrategy": "InPlace", "progressDeadlineSeconds": 600},
}


class Alarms:
    """What the status of a job has said of hangs, slow ranks and restarts so far."""

    def __init__(self, job: Job) -> None:
        self._job, self.found = job, Counter[str]()
        self._said: set[str] = set()

    def look(self) -> None:
        """Take in what it says now."""
        status = self._job.status()
        for one in status.get("conditions", []):
            if one["type"] in ("HangSuspected", "Straggling") and one["status"] == "True":
                self._take(one["type"], f"{one['lastTransitionTime']} {one['message']}")
        for attempt in status.get("attempts", []):
            if attempt["number"] > 1:
                self._take("Restart", f"attempt {attempt['number']}")
            for count in range(attempt.get("restartsInPlace") or 0):
                self._take("Restart in place", f"{count} of attempt {attempt['number']}")

    def _take(self, kind: str, sentence: str) -> None:
        if f"{kind} {sentence}" not in self._said:
            self._said.add(f"{kind} {sentence}")
            self.found[kind] += 1
            print(f"{kind}: {sentence}", file=sys.stderr, flush=True)


def freeze(job: Job, pods: list[int], seconds: float, alarms: Alarms) -> None:
    """Stop all processes of these pods for so long."""
    frozen: list[psutil.Process] = []
    for pod in pods:
        agent = job.agent(pod * RANKS_PER_POD)
        frozen += [agent, *agent.children(recursive=True)]
    for process in frozen:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    watch(seconds, alarms)
    for process in frozen:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def watch(seconds: float, alarms: Alarms) -> None:
    """Look at the job for so long."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        alarms.look()
        time.sleep(LOOK_SECONDS)


def measure(quick: bool, minutes: int = MINUTES) -> Iterator[harness.Row]:
    chance, pauses, longest = random.Random(0), Counter[str](), {False: 0.0, True: 0.0}
    with running(DISTTRAIN, SPEC, files=[Path(busy_code.__file__)]) as job:
        job.until_training(1)
        alarms, began = Alarms(job), time.monotonic()
        until = began + 60.0 * (QUICK_MINUTES if quick else minutes)
        while time.monotonic() < until:
            watch(chance.uniform(*BETWEEN_SECONDS), alarms)
            pods = chance.choice([[0], [1], [0, 1]])
            seconds = chance.uniform(*(FROZEN_SECONDS if len(pods) < PODS else ALL_FROZEN_SECONDS))
            freeze(job, pods, seconds, alarms)
            longest[len(pods) == PODS] = max(longest[len(pods) == PODS], seconds)
            pauses[f"pods {pods} frozen"] += 1
        lasted, found, step = time.monotonic() - began, Counter(alarms.found), job.log.read().step
        done = Path(job.folder, busy_code.DONE)
        lines = done.read_text().splitlines() if done.exists() else []
        yield harness.Row("time", lasted / 60, "minutes")
        yield harness.Row("steps", step, "steps")
        yield harness.Row("evaluations", step // SPEC["training"]["evaluation"]["interval"], "times")
        yield harness.Row("checkpoints", step // SPEC["training"]["checkpoint"]["interval"], "times")
        yield harness.Row("ranks that compiled", sum(line.startswith("compiled") for line in lines), "times")
        yield harness.Row("samples that took seconds", sum(line.startswith("read") for line in lines), "times")
        for kind, times in sorted(pauses.items()):
            yield harness.Row(kind, times, "times")
        yield harness.Row("longest freeze of one pod", longest[False], "s")
        yield harness.Row("longest freeze of both", longest[True], "s")
        for kind in ("HangSuspected", "Straggling", "Restart in place", "Restart"):
            yield harness.Row(f"false alarms: {kind}", found[kind], "alarms")
        job.rank(1).suspend()
        job.until(lambda: alarms.look() or alarms.found["HangSuspected"] > found["HangSuspected"], "the hang is named",
                  PATIENCE_SECONDS, pause=LOOK_SECONDS)  # fmt: skip
        yield harness.Row("a rank that is stopped alone: named", 1, "times", 1)


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",), numbers={"minutes": "how long, instead of an hour"})
