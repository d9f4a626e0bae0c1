"""How long until a rank that hangs or is slow is found, and whether the right one is named; local runs of three ranks.

A rank is stopped (SIGSTOP), or enters a barrier that the others do not enter: from then until the operator's own code,
which asks the job's agent at its own pace, names a rank (condition HangSuspected; the reference is three median steps
and two seconds), and until it has found the hang that restarts the job (the reference is progressDeadlineSeconds). Both
name the rank that holds up the others, by the stacks of all. It is named in 20 jobs, one after the other; then further
jobs hang side by side until they are found.

A rank whose samples take ten times as long: until the job's condition Straggling names it. The trainer compares ranks
in three windows of a minute; with --quick they have 5 s. The reference is the time of the three windows.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), *(str(REPOSITORY / package) for package in ("api", "operator", "trainer_image"))]

from benchmarks import hanging_code, harness
from benchmarks.local_agents import INTERVAL_SECONDS, LocalAgent, asking, polled, world_of
from benchmarks.local_job import Job, running
from benchmarks.local_start import DISTTRAIN
from disttrain_operator.decide.live import Stall, Suspicion

RANKS = 3
DEADLINE_SECONDS = 60
"""The least that the field takes."""
STEPS_BEFORE = 50
WINDOWS, WINDOW_SECONDS, QUICK_WINDOW_SECONDS = 3, 60.0, 5.0
PATIENCE_SECONDS = 600.0
NAMED, QUICK_NAMED = 20, 2
"""Jobs of which a rank is named."""
CODE = [Path(hanging_code.__file__)]
NAMES = {"stopped": "a stopped rank", "collective": "a barrier of one rank"}


def spec(window: float | None = None) -> dict[str, Any]:
    return {
        "workers": {"replicas": 1, "processesPerPod": RANKS},
        "training": {
            "model": {"entrypoint": "hanging_code:model"},
            "data": {"entrypoint": "hanging_code:data", "config": {"window": window}},
            "steps": 100_000_000,
            "microBatchSize": 4,
            "logging": {"interval": 5},
        },
        "runPolicy": {"progressDeadlineSeconds": DEADLINE_SECONDS},
    }


def train(job: Job) -> float:
    """Wait until it has done some steps; return the seconds that one takes, as a median."""
    job.until(lambda: job.log.read().step >= STEPS_BEFORE, f"{STEPS_BEFORE} steps are done")
    (path,) = job.folder.glob("disttrain-runs/*/metrics/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    # The first line has what a start takes.
    return statistics.median(line["time_metrics/end_to_end(s)"] for line in lines[1:])


@dataclass
class Hang:
    """A job of which one rank is to hang, and what was found."""

    job: Job
    kind: str
    victim: int
    step_seconds: float
    agent: LocalAgent
    began: float = 0.0
    named: float = 0.0
    suspicion: Suspicion | None = None
    found: float = 0.0
    stall: Stall | None = None

    def begin(self) -> None:
        """Have the rank hang."""
        self.began = time.perf_counter()
        if self.kind == "stopped":
            self.job.rank(self.victim).suspend()
        else:
            Path(self.job.folder, hanging_code.FAULT).write_text(f"{self.kind} {self.victim}")


async def find(hangs: list[Hang], known: Callable[[Hang], bool]) -> None:
    """Have all of them hang while the operator's code asks, at any moment of its rounds; return when all are known, or
    time is over."""
    by_uid = {one.agent.uid: one for one in hangs}
    world, tokens = world_of([one.agent.job for one in hangs]), {uid: one.agent.token for uid, one in by_uid.items()}

    all_known, all_found = asyncio.Event(), asyncio.Event()

    def wake(uid: str) -> None:
        live, one = agents.live(uid), by_uid[uid]
        if live is not None and live.suspicion is not None and one.suspicion is None:
            one.named, one.suspicion = time.perf_counter(), live.suspicion
        if live is not None and live.stall is not None and one.stall is None:
            one.found, one.stall = time.perf_counter(), live.stall
        if all(known(one) for one in hangs):
            all_found.set()
        if all(agents.live(uid) is not None for uid in by_uid):
            all_known.set()

    ask = asking(lambda agent: by_uid[agent.job_uid].agent.port)
    async with polled(world, tokens, wake, ask) as agents:
        await asyncio.wait_for(all_known.wait(), PATIENCE_SECONDS)
        await asyncio.sleep(random.uniform(0, INTERVAL_SECONDS))
        for one in hangs:
            one.begin()
        with suppress(TimeoutError):
            await asyncio.wait_for(all_found.wait(), 2 * DEADLINE_SECONDS)


def name(kind: str, victim: int) -> Hang:
    """Return a hang of a job of its own, once its rank is named."""
    with running(DISTTRAIN, spec(), files=CODE) as job:
        hang = Hang(job, kind, victim, train(job), LocalAgent.of(job))
        asyncio.run(find([hang], lambda one: one.suspicion is not None))
        return hang


def _suspected(one: Hang) -> int | None:
    return one.suspicion.blame.rank if one.suspicion is not None else None


def _blamed(one: Hang) -> int | None:
    return one.stall.blame.rank if one.stall is not None and one.stall.blame is not None else None


def slow(victim: int, window: float | None) -> tuple[float, float, bool]:
    """Seconds until a rank with slow samples is named, seconds of a step before, and whether it is the right one."""
    with running(DISTTRAIN, spec(window), files=CODE) as job:
        step_seconds = train(job)
        began = time.perf_counter()
        Path(job.folder, hanging_code.FAULT).write_text(f"loader {victim}")
        job.until(lambda: straggler(job), "a slow rank is named", PATIENCE_SECONDS, pause=0.25)
        taken = time.perf_counter() - began
        return taken, step_seconds, straggler(job).startswith(f"rank {victim} (")


def straggler(job: Job) -> str:
    """What the status says of a slow rank."""
    found = job.status().get("conditions", [])
    return next((one["message"] for one in found if (one["type"], one["status"]) == ("Straggling", "True")), "")


def measure(quick: bool) -> Iterator[harness.Row]:
    alone = [name(kind, number % RANKS) for number in range((QUICK_NAMED if quick else NAMED) // 2) for kind in NAMES]
    for kind, title in NAMES.items():
        seen = [one for one in alone if one.kind == kind]
        if named := [one for one in seen if one.suspicion is not None]:
            steps = [one.step_seconds for one in named]
            goal = 3 * statistics.median(steps) + 2
            yield from _found(f"{title}: named", [one.named - one.began for one in named], steps, goal)
        yield _right(f"{title}: the status names it", [_suspected(one) == one.victim for one in seen])
    # Each rank is the one.
    victims = [1] if quick else list(range(RANKS))
    hangs = []
    with ExitStack() as jobs:
        for kind in NAMES:
            for victim in victims:
                job = jobs.enter_context(running(DISTTRAIN, spec(), files=CODE))
                hangs.append(Hang(job, kind, victim, train(job), LocalAgent.of(job)))
        asyncio.run(find(hangs, lambda one: one.stall is not None))
    for kind, title in NAMES.items():
        seen = [one for one in hangs if one.kind == kind]
        if found := [one for one in seen if one.stall is not None]:
            seconds = [one.found - one.began for one in found]
            yield from _found(f"{title}: found", seconds, [one.step_seconds for one in found], DEADLINE_SECONDS)
        yield _right(f"{title}: the verdict names it", [_blamed(one) == one.victim for one in seen])
    window = QUICK_WINDOW_SECONDS if quick else None
    slows = [slow(victim, window) for victim in victims]
    seconds, steps, named = zip(*slows, strict=True)
    yield from _found("slow samples: found", seconds, steps, WINDOWS * (window or WINDOW_SECONDS))
    yield _right("slow samples: the status names it", named)


def _found(
    name: str, seconds: Sequence[float], step_seconds: Sequence[float], reference: float
) -> Iterator[harness.Row]:
    yield harness.row(f"{name} after", "s", seconds, [reference])
    in_steps = [whole / step for whole, step in zip(seconds, step_seconds, strict=True)]
    yield harness.row(f"{name} after", "median steps", in_steps)


def _right(name: str, right: Sequence[object]) -> harness.Row:
    return harness.Row(name, sum(map(bool, right)), "of them", len(right), len(right))


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch",))
