"""Random kills in a run, and what must be so after them: the steps are those of a run without kills, and the status
names each kill."""

import contextlib
import json
import random
import re
from collections.abc import Callable
from typing import Any, Protocol

import psutil

MOST_STEPS = 8
"""Steps of a life that is not let go; a killed one has seen up to BEFORE_A_KILL of them in metrics.jsonl."""
BEFORE_A_KILL = 5
SURVIVED = re.compile(r"resuming after step (\d+) from the memory of ranks? \d[\d, and]*, which ha(?:s|ve) survived")
RESTARTED = re.compile(r"\[agent\] restart (\d+) in place: rank (\d+) (failed|was lost with its pod)")


class Followed(Protocol):
    """A run whose processes are on this machine."""

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """The condition's first answer that is true."""

    def below(self) -> list[psutil.Process]:
        """All its processes."""

    def log(self, worker: int, attempt: int) -> str:
        """Log of a worker."""

    @property
    def metrics(self) -> str:
        """Text of metrics.jsonl; none before it is there."""

    @property
    def seen_status(self) -> dict[str, Any]:
        """The job's status, also while it runs."""


class Chaos:
    """Kills in a run, and what its status must say of them."""

    def __init__(self, run: Followed, pods: int, per_pod: int, random: random.Random) -> None:
        self._run, self._per_pod, self._world, self._random = run, per_pod, per_pod * pods, random
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

    def kill_one_of_each_pod(self) -> None:
        """At once."""
        self._end_life(
            [self._random.randrange(first, first + self._per_pod) for first in range(0, self._world, self._per_pod)]
        )

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
        ranks, lost = self._trains(), self._random.choice(range(0, self._world, self._per_pod))
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
        self._run.until(lambda: self._run.metrics.count(begin) >= lines, f"{lines} steps of {life}")
        ranks = self._run.until(lambda: self._next_ranks(self._world), f"all ranks of {life} are there")
        return dict(ranks)

    def _next_ranks(self, least: int) -> dict[int, psutil.Process]:
        """Ranks that run and are of no former life, if there are so many."""
        there = ranks_of(self._run.below())
        found = {rank: process for rank, process in there.items() if process not in self._former}
        return found if len(found) >= least else {}

    def _has_new_checkpoint(self) -> bool:
        status = self._run.seen_status
        before = [entry["checkpointStep"] for entry in status["attempts"][-1].get("replacements", [])]
        return bool("checkpoint" in status and status["checkpoint"]["step"] > max(before, default=0))


def runs(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped; a zombie does neither."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def rank_number(process: psutil.Process) -> int | None:
    """The rank that a process is: a fork has the name, a program the command."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
        kind, _, rank = process.name().partition(" ")
        if kind == "rank":
            return int(rank)
        if process.cmdline()[-1:] == ["disttrain_trainer"]:
            return int(process.environ()["RANK"])
    return None


def ranks_of(processes: list[psutil.Process]) -> dict[int, psutil.Process]:
    """Those of the processes that are ranks and run, by rank. None runs twice: no two lives are side by side."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        rank = rank_number(process)
        if rank is not None and runs(process):
            # It may have ended since it was seen.
            assert rank not in found or not runs(found[rank]), f"two processes are rank {rank}"
            found[rank] = process
    return found


def agent_of(rank: psutil.Process) -> psutil.Process:
    """The agent of a rank's pod."""
    agent = rank.parent()
    assert agent is not None
    assert agent.name() == "agent" or agent.cmdline()[-1] == "disttrain_agent"
    return agent


Life = tuple[int, int]
"""Attempt, and restarts in place before."""


def lives(metrics: str) -> dict[Life, dict[int, tuple[float, float]]]:
    """Loss and gradient norm of the steps of each life, in the order of the file. No life has a step twice."""
    found: dict[Life, dict[int, tuple[float, float]]] = {}
    for text in metrics.splitlines():
        line = json.loads(text)
        if "loss_metrics/global_avg_loss" in line:
            life = (line["attempt"], line.get("generation", 0))
            steps = found.setdefault(life, {})
            assert line["step"] not in steps, text
            assert life == max(found), f"a former life has done a step: {text}"
            steps[line["step"]] = (line["loss_metrics/global_avg_loss"], line["grad_norm"])
    return found


def has_the_steps_of(run: Followed, undisturbed: Followed, last: int, interval: int) -> None:
    """Assert that each life goes on after a checkpoint that the former ones have come to, or from a rank that has
    survived, and that each of its steps is, bit for bit, the one of the run that nobody has disturbed.

    The last step that such a rank has done may have no line: a part of its loss is lost.
    """
    logs = "".join(run.log(0, attempt) for attempt in range(1, run.seen_status["attempt"] + 1))
    survived = {int(step) for step in SURVIVED.findall(logs)}
    (expected,) = lives(undisturbed.metrics).values()
    assert list(expected) == list(range(1, last + 1))
    furthest, seen = 0, set()
    for life, steps in lives(run.metrics).items():
        first, end = min(steps), max(steps)
        assert list(steps) == list(range(first, end + 1)), life
        assert first - 1 in survived or (first <= furthest + 1 and first % interval == 1), life
        assert steps == {step: expected[step] for step in steps}, life
        furthest = max(furthest, end)
        seen |= steps.keys()
    assert furthest == last
    assert expected.keys() - seen <= survived
    assert survived, "no life has gone on from a survivor"


def says_what_happened(run: Followed, chaos: Chaos, last: int) -> None:
    """Assert that the status counts what ended a life, and that worker 0's agent has named a cause of each."""
    status = run.seen_status
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
