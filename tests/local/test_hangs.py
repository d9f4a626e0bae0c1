"""Ranks that hang by themselves, through `disttrain run`: it asks their agents and judges as the operator does."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.builders import a_claim_template

from .conftest import DISTTRAIN, Run, Workplace
from .test_restarts_in_place import agent_of, ranks_of

STEPS, BATCH = 1500, 16


def start(workplace: Workplace, strategy: str, deadline: int | None = 10, command: Sequence[str] = DISTTRAIN) -> Run:
    """Two pods with a rank each, which have done some steps and know how long these take."""
    shutil.copy(Path(__file__).with_name("faulty_ranks.py"), workplace.folder)
    training: dict[str, Any] = {
        "steps": STEPS,
        "microBatchSize": BATCH,
        "checkpoint": {"interval": 20},
        "logging": {"interval": 1},
        "data": {"name": None, "entrypoint": "faulty_ranks:digits"},
        "model": {"name": None, "entrypoint": "faulty_ranks:model"},
    }
    policy = {"restartStrategy": strategy, "restartBackoffSeconds": 0}
    if deadline is not None:
        policy["progressDeadlineSeconds"] = deadline
    manifest = workplace.write(training=training, storage=a_claim_template(), runPolicy=policy)
    run = workplace.start(manifest, command=command)
    run.until(lambda: list(run.folder.glob("disttrain-runs/*/storage/*/step-40/.metadata")), "it trains")
    return run


def goes_on(workplace: Workplace, run: Run) -> dict[str, Any]:
    """Take the fault away, and return the status of the job, which has come to its end."""
    (workplace.folder / "released").touch()
    assert run.wait() == 0, run.stderr
    assert not run.left()
    assert run.status["phase"] == "Succeeded"
    return run.status


def loses_no_step(log: str, survivor: int) -> bool:
    """Return whether ranks that start again have a surviving rank's state, or a checkpoint of the same step."""
    kept = f"from the memory of rank {survivor}, which has survived" in log
    return kept or re.search(r"the checkpoint of step (\d+) is as new as the state of step \1\b", log) is not None


def stop(run: Run, *processes: psutil.Process) -> None:
    for process in processes:
        process.suspend()
    run.until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in processes), "they are stopped")


@pytest.mark.parametrize(
    ("rank", "deadline"), [(0, 10), (1, 10), (1, 3600)], ids=["rank 0", "rank 1", "long before the deadline"]
)
def test_a_stopped_rank_is_named_and_starts_again_in_its_pod(workplace: Workplace, rank: int, deadline: int) -> None:
    run = start(workplace, "InPlace", deadline)
    stop(run, ranks_of(run)[rank])
    run.until(
        lambda: f"rank {rank} (pod digits-" in run.stderr and "is stopped by a signal" in run.stderr, "it is named"
    )
    run.until(lambda: "restart 1 in place" in run.log(0, attempt=1), "the ranks start again")
    (attempt,) = goes_on(workplace, run)["attempts"]
    assert attempt["restartsInPlace"] == 1
    assert f"rank {rank} (pod digits-" in attempt["lastRestartInPlace"]
    assert "was killed by its agent, since no rank did a step" in attempt["lastRestartInPlace"]
    assert loses_no_step(run.log(0, attempt=1), survivor=1 - rank)


def test_a_deadlock_in_collectives_is_named_with_both_places_and_the_gang_recreated(workplace: Workplace) -> None:
    (workplace.folder / "deadlock").write_text("70")
    run = start(workplace, "Recreate")
    run.until(lambda: run.log(0, attempt=2), "the next attempt begins")
    first, second = goes_on(workplace, run)["attempts"]
    found = first["verdict"]
    assert (found["class"], found["reason"], found.get("rank")) == ("Hang", "ProgressDeadlineExceeded", None)
    assert "rank 0 waits in all_reduce (" in found["message"]
    assert "rank 1 waits in broadcast (" in found["message"]
    assert "they wait for each other" in found["message"]
    assert second["verdict"]["reason"] == "WorkersSucceeded"


def test_the_stopped_pod_of_rank_0_is_lost_with_its_gang(workplace: Workplace) -> None:
    """Without a deadline, too, as an operator knows it: its agent is silent, and the others wait for it."""
    run = start(workplace, "Recreate", deadline=None)
    rank = ranks_of(run)[0]
    stop(run, agent_of(rank), rank)
    run.until(lambda: run.log(0, attempt=2), "the next attempt begins")
    first, _ = goes_on(workplace, run)["attempts"]
    assert (first["verdict"]["reason"], first["verdict"]["class"]) == ("PodSilent", "PodLost")
    assert "worker-0-a1" in first["verdict"]["pod"]


def test_a_data_server_that_is_dead_is_a_hang_in_which_all_wait_for_data(workplace: Workplace) -> None:
    run = start(workplace, "Recreate")
    (workplace.folder / "server").touch()
    run.until(lambda: run.log(0, attempt=2), "the next attempt begins")
    first, _ = goes_on(workplace, run)["attempts"]
    assert first["verdict"]["class"] == "Hang"
    assert "all ranks wait for data" in first["verdict"]["message"]


def test_a_sample_that_takes_longer_than_the_deadline_is_no_hang(workplace: Workplace) -> None:
    run = start(workplace, "Recreate")
    (workplace.folder / "slow").touch()
    run.until((workplace.folder / "slept").exists, "the sample is there")
    status = goes_on(workplace, run)
    assert (status["attempt"], len(status["attempts"])) == (1, 1)
    assert "HangSuspected" not in run.stderr
    assert not any(one["type"] == "HangSuspected" and one["status"] == "True" for one in status["conditions"])
