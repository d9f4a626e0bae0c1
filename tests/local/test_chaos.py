"""Random kills in a run: its steps are those of a run without kills, and its status names each kill.

The ranks hold the whole model, or parts of it.
"""

import contextlib
import json
import random
import re
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.builders import a_claim_template
from tests.chance import chance

from .conftest import Run, Workplace, runs
from .test_restarts_in_place import agent_of
from .test_surviving_parts import HYBRID, STAGES, TENSORS

KILLS_OF_A_ROUND = 15
PER_POD = 2
INTERVAL, BATCH = 3, 16
MOST_STEPS = 8
"""Steps of a life that is not let go; a killed one has seen up to BEFORE_A_KILL of them in metrics.jsonl."""
BEFORE_A_KILL = 5
SURVIVED = re.compile(r"resuming after step (\d+) from the memory of ranks? \d[\d, and]*, which ha(?:s|ve) survived")
RESTARTED = re.compile(r"\[agent\] restart (\d+) in place: rank (\d+) (failed|was lost with its pod)")


def steps_of(rounds: int) -> int:
    """More than all lives before the last one can do."""
    return (rounds * KILLS_OF_A_ROUND + 2) * MOST_STEPS


def job(place: Workplace, released: Path, pods: int, parallelism: dict[str, Any], steps: int) -> Path:
    """A job whose ranks are held after some steps of each life, until the file is there."""
    shutil.copy(Path(__file__).with_name("held_data.py"), place.folder)
    config = {"samples": MOST_STEPS * BATCH, "file": str(released)}
    training: dict[str, Any] = {
        "steps": steps,
        "microBatchSize": BATCH,
        "checkpoint": {"interval": INTERVAL},
        "logging": {"interval": 1},
        "data": {"name": None, "entrypoint": "held_data:paced_digits_until", "config": config},
        "model": {"name": "mlp", "config": {"inputSize": 64, "outputSize": 10}},
    }
    return place.write(
        workers={"replicas": pods, "processesPerPod": PER_POD},
        training=training,
        storage=a_claim_template(),
        runPolicy={"restartStrategy": "InPlace", "maxRestarts": 1000, "restartBackoffSeconds": 0},
        **({"parallelism": parallelism} if parallelism else {}),
    )


class Chaos:
    """Kills in a run, and what its status must say of them."""

    def __init__(self, run: Run, pods: int, random: random.Random) -> None:
        self._run, self._world, self._random = run, PER_POD * pods, random
        self._former: set[psutil.Process] = set()
        """Ranks of lives that have ended, or will."""
        self.kills = 0
        self.causes: list[list[set[int]]] = [[]]
        """By attempt, of each life that ended in its pods: the ranks that may be named as its cause."""
        self.replaced: list[int] = [0]
        """By attempt, how many pods were made again alone."""

    def kill_a_rank(self) -> None:
        """Some steps after its start."""
        self._end_life(self._random.sample(range(self._world), 1))

    def kill_two(self) -> None:
        """At once."""
        self._end_life(self._random.sample(range(self._world), 2))

    def kill_amid_a_restart(self) -> None:
        """A rank, and one of the next life when some of it are there: its others may not have been started yet."""
        self.kill_a_rank()
        least = self._random.randint(1, self._world)
        began = self._run.until(lambda: self._next_ranks(least), f"{least} ranks have started again")
        rank = self._random.choice(sorted(began))
        self._kill(began[rank])
        self._former.update(began.values())
        self.causes[-1].append({rank})

    def kill_beside_a_stopped_rank(self) -> None:
        """A rank that is stopped cannot obey the order to end."""
        ranks = self._trains()
        stopped, killed = self._random.sample(range(self._world), 2)
        ranks[stopped].suspend()
        self.kills += 1
        self._run.until(lambda: ranks[stopped].status() == psutil.STATUS_STOPPED, f"rank {stopped} is stopped")
        self._end_life([killed], ranks)

    def kill_a_pod(self) -> None:
        """Kill one by its agent, once there is a checkpoint since one was lost last: it alone is made again."""
        ranks, lost = self._trains(), self._random.choice(range(0, self._world, PER_POD))
        self._run.until(self._has_new_checkpoint, "the status has a checkpoint since the last loss of a pod")
        self._kill(agent_of(ranks[lost]))
        self._former.update(ranks.values())
        self.causes[-1].append({lost})
        self.replaced[-1] += 1

    def kill_the_only_pod(self) -> None:
        """Kill it by its agent: the gang is made again."""
        ranks = self._trains()
        self._kill(agent_of(ranks[0]))
        self._former.update(ranks.values())
        self.causes.append([])
        self.replaced.append(0)

    def _end_life(self, victims: list[int], ranks: dict[int, psutil.Process] | None = None) -> None:
        ranks = ranks or self._trains()
        for rank in victims:
            self._kill(ranks[rank])
        self._former.update(ranks.values())
        self.causes[-1].append(set(victims))

    def _kill(self, process: psutil.Process) -> None:
        process.kill()
        self.kills += 1

    def _trains(self) -> dict[int, psutil.Process]:
        """The ranks of the next life, once it has done some steps."""
        life: dict[str, int] = {"attempt": len(self.causes)}
        if self.causes[-1]:
            life["generation"] = len(self.causes[-1])
        begin = json.dumps({**life, "step": 0}).removesuffix("0}")
        lines = self._random.randint(1, BEFORE_A_KILL)
        self._run.until(lambda: metrics(self._run).count(begin) >= lines, f"{lines} steps of {life}")
        ranks = self._run.until(lambda: self._next_ranks(self._world), f"all ranks of {life} are there")
        return dict(ranks)

    def _next_ranks(self, least: int) -> dict[int, psutil.Process]:
        """Ranks that run and are of no former life, if there are so many."""
        found = {}
        for process in self._run.below():
            with contextlib.suppress(psutil.NoSuchProcess):
                kind, _, rank = process.name().partition(" ")
                if kind == "rank" and process not in self._former and runs(process):
                    found[int(rank)] = process
        return found if len(found) >= least else {}

    def _has_new_checkpoint(self) -> bool:
        (path,) = self._run.folder.glob("disttrain-runs/*/status.yaml")
        status = yaml.safe_load(path.read_text())["status"]
        before = [entry["checkpointStep"] for entry in status["attempts"][-1].get("replacements", [])]
        return bool("checkpoint" in status and status["checkpoint"]["step"] > max(before, default=0))


def metrics(run: Run) -> str:
    """Text of metrics.jsonl; none before it is there."""
    return "".join(path.read_text() for path in run.folder.glob("disttrain-runs/*/metrics/metrics.jsonl"))


Life = tuple[int, int]
"""Attempt, and restarts in place before."""


def lives(run: Run) -> dict[Life, dict[int, tuple[float, float]]]:
    """Loss and gradient norm of the steps of each life, in the order of the file. No life has a step twice."""
    found: dict[Life, dict[int, tuple[float, float]]] = {}
    for text in metrics(run).splitlines():
        line = json.loads(text)
        if "loss_metrics/global_avg_loss" in line:
            steps = found.setdefault((line["attempt"], line.get("generation", 0)), {})
            assert line["step"] not in steps, text
            steps[line["step"]] = (line["loss_metrics/global_avg_loss"], line["grad_norm"])
    return found


def has_the_steps_of(run: Run, undisturbed: Run, last: int) -> None:
    """Assert that each life goes on after a checkpoint that the former ones have come to, or from a rank that has
    survived, and that each of its steps is, bit for bit, the one of the run that nobody has disturbed.

    The last step that such a rank has done may have no line: a part of its loss is lost.
    """
    logs = "".join(run.log(0, attempt) for attempt in range(1, run.status["attempt"] + 1))
    survived = {int(step) for step in SURVIVED.findall(logs)}
    (expected,) = lives(undisturbed).values()
    assert list(expected) == list(range(1, last + 1))
    found, furthest, seen = lives(run), 0, set()
    assert list(found) == sorted(found)
    for life, steps in found.items():
        first, end = min(steps), max(steps)
        assert list(steps) == list(range(first, end + 1)), life
        assert first - 1 in survived or (first <= furthest + 1 and first % INTERVAL == 1), life
        assert steps == {step: expected[step] for step in steps}, life
        furthest = max(furthest, end)
        seen |= steps.keys()
    assert furthest == last
    assert expected.keys() - seen <= survived
    assert survived, "no life has gone on from a survivor"


def says_what_happened(run: Run, chaos: Chaos, last: int) -> None:
    """Assert that the status counts what ended a life, and that worker 0's agent has named a cause of each."""
    status = run.status
    attempts = status["attempts"]
    restarts = len(chaos.causes) - 1 + sum(chaos.replaced)
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", len(chaos.causes), restarts)
    assert (status["progress"]["step"], status["checkpoint"]["step"]) == (last, last)
    assert [entry.get("restartsInPlace", 0) for entry in attempts] == [len(ended) for ended in chaos.causes]
    assert [len(entry.get("replacements", [])) for entry in attempts] == chaos.replaced
    for attempt, causes in enumerate(chaos.causes, start=1):
        named = [(int(count), int(rank)) for count, rank, _ in RESTARTED.findall(run.log(0, attempt))]
        assert [count for count, _ in named] == list(range(1, len(causes) + 1))
        assert [rank for (_, rank), ranks in zip(named, causes, strict=True) if rank not in ranks] == [], (
            named,
            causes,
        )


def adds_up(run: Run, last: int) -> None:
    """Assert that each second from the job's creation to its end is in one state of its goodput."""
    status, job = run.status, yaml.safe_load((run.home / "status.yaml").read_text())
    goodput = status["goodput"]
    spent = {entry["state"]: entry["seconds"] for entry in goodput["spent"]}
    assert goodput["since"] == job["metadata"]["creationTimestamp"]
    assert (goodput["updateTime"], goodput.get("state")) == (status["completionTime"], None)
    assert sum(spent.values()) == (_time(goodput["updateTime"]) - _time(goodput["since"])).total_seconds()
    assert set(spent) <= {"Starting", "Training", "Redoing", "Saving", "Evaluating", "Restarting"}
    assert spent["Restarting"] > 0
    assert goodput["furthestStep"] == last


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("pods", "parallelism", "rounds"),
    [(1, {}, 2), (2, {}, 2), (2, HYBRID, 1), (2, TENSORS, 1), (2, STAGES, 1)],
    ids=["one pod", "two pods", "shards", "tensors", "stages"],
)
def test_many_kills_change_no_step_and_the_status_tells_of_each(
    workplace: Workplace, pods: int, parallelism: dict[str, Any], rounds: int
) -> None:
    random, released = chance(), workplace.folder / "released"
    kills, last = rounds * KILLS_OF_A_ROUND, steps_of(rounds)
    run = workplace.start(job(workplace, released, pods, parallelism, last))
    chaos = Chaos(run, pods, random)
    of_two: list[Callable[[], None]] = [chaos.kill_two, chaos.kill_beside_a_stopped_rank] * rounds
    of_two += [chaos.kill_amid_a_restart] * 2 * rounds
    of_pods = [chaos.kill_a_pod] * 3 * rounds if pods > 1 else [chaos.kill_the_only_pod] * rounds
    acts = of_two + of_pods + [chaos.kill_a_rank] * (kills - 2 * len(of_two) - len(of_pods))
    random.shuffle(acts)
    for act in acts:
        act()
    assert chaos.kills == kills
    released.touch()
    assert run.wait() == 0, run.stderr
    assert not run.left()

    undisturbed = workplace.beside("undisturbed")
    other = undisturbed.run(job(undisturbed, released, pods, parallelism, last))
    assert other.exit_code == 0, other.stderr
    has_the_steps_of(run, other, last)
    says_what_happened(run, chaos, last)
    adds_up(run, last)
