"""Ranks that start again in their pod, through `disttrain run`: real ranks, a real kill, and no step that differs.

They go on from the memory of the rank that was not killed, or from the checkpoint where that has none.
"""

import contextlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.builders import a_claim_template
from tests.chaos import agent_of

from .conftest import Run, Workplace

STEPS, INTERVAL, BATCH = 24, 5, 16
SEEN = 12
"""A step between two checkpoints, after which the ranks wait."""
HELD_AFTER = SEEN + 4
"""Batches: some are read ahead, and a step is logged late."""


RESUMES = re.compile(
    r"resuming after step (\d+) from the memory of ranks? ([\d, and]+), which ha(?:s|ve) survived; (.*)"
)


def job(
    place: Workplace, released: Path, pods: int = 1, *, ranks: int = 2, scarce: bool = False, **parallelism: Any
) -> Path:
    """Ranks in one pod or in several, which come to a step between two checkpoints and wait for the file there.

    scarce: their pods have no memory to spare.
    """
    shutil.copy(Path(__file__).with_name("held_data.py"), place.folder)
    # DDP alone reads one before the first step, of which it learns its buckets.
    held_after = HELD_AFTER - bool(parallelism)
    config = {"samples": held_after * BATCH, "file": str(released)} | ({"memory": 0} if scarce else {})
    training: dict[str, Any] = {
        "steps": STEPS,
        "microBatchSize": BATCH,
        # In the step itself, so that it is reported while the ranks wait.
        "checkpoint": {"interval": INTERVAL, "asynchronous": False},
        "logging": {"interval": 1},
        "data": {"name": None, "entrypoint": "held_data:digits_until", "config": config},
        "model": {"name": "mlp", "config": {"inputSize": 64, "outputSize": 10}},
    }
    return place.write(
        workers={"replicas": pods, "processesPerPod": ranks // pods},
        training=training,
        storage=a_claim_template(),
        runPolicy={"restartStrategy": "InPlace"},
        **({"parallelism": parallelism} if parallelism else {}),
    )


def curve(run: Run) -> dict[int, set[tuple[float, float, int]]]:
    """Loss, gradient norm and attempt of each step, as often as it was done."""
    seen = defaultdict(set)
    for text in (run.home / "metrics" / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if "loss_metrics/global_avg_loss" in line:
            seen[line["step"]].add((line["loss_metrics/global_avg_loss"], line["grad_norm"], line["attempt"]))
    return dict(seen)


def generations(run: Run) -> dict[int, int]:
    """The last life of the ranks in which each step was done."""
    lines = [json.loads(text) for text in (run.home / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line.get("generation", 0) for line in lines}


def is_held(run: Run) -> bool:
    """Whether the ranks have come to the step in which they wait, and the checkpoint before it is complete, and their
    agents know each other."""
    saved = list(run.folder.glob(f"disttrain-runs/*/storage/*/step-{2 * INTERVAL}/.metadata"))
    if not saved:
        return False
    log, alone = run.log(0, attempt=1), not run.log(1, attempt=1)
    return f"step: {SEEN}  " in log and (alone or "all 2 workers are connected" in log)


def resumed_from_memory(run: Run, survivors: Sequence[Set[int]]) -> int:
    """The step after which the ranks have gone on from the memory of one of these sets of ranks; at most one step was
    done twice."""
    found = RESUMES.search(run.log(0, attempt=1))
    assert found is not None, run.log(0, attempt=1)
    step, left_by, disk = int(found[1]), {int(rank) for rank in re.findall(r"\d", found[2])}, found[3]
    assert left_by in survivors
    assert disk == f"the newest checkpoint is of step {2 * INTERVAL}"
    assert step >= SEEN
    lines = [json.loads(text)["step"] for text in (run.home / "metrics" / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) - len(set(lines)) <= 1
    return step


def checkpoint_in_status(run: Run) -> int | None:
    """Step of the checkpoint in the status of a run that goes on."""
    status = yaml.safe_load((run.home / "status.yaml").read_text())["status"]
    return status["checkpoint"]["step"] if "checkpoint" in status else None


def ends_as_undisturbed(
    workplace: Workplace, run: Run, released: Path, pods: int = 1, restarts: int = 0,
    survivors: Sequence[Set[int]] | None = ({0},), ranks: int = 2, **parallelism: Any,
) -> tuple[Run, dict[str, Any]]:  # fmt: skip
    """Let the run go on, whose ranks restart once in place, and assert that its steps are those of a run that does not;
    return that run, and the attempt. survivors: see above; None: they go on from the checkpoint."""
    released.touch()
    assert run.wait() == 0, run.stderr
    undisturbed = workplace.beside("undisturbed")
    other = undisturbed.run(job(undisturbed, released, pods=pods, ranks=ranks, **parallelism))
    assert other.exit_code == 0, other.stderr
    done = 2 * INTERVAL if survivors is None else resumed_from_memory(run, survivors)
    expected, found = curve(other), curve(run)
    assert sorted(expected) == list(range(1, STEPS + 1))
    # The lost rank has taken its part of the loss of the last step with it, unless that was logged before.
    missing = expected.keys() - found.keys()
    assert missing <= ({done} if survivors is not None else set())
    assert found == {step: figures for step, figures in expected.items() if step not in missing}
    seen = generations(run)
    assert seen == {step: int(step > done) for step in found}
    status = run.status
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 1, restarts)
    (attempt,) = status["attempts"]
    assert attempt["restartsInPlace"] == 1
    return other, attempt


def test_a_killed_rank_starts_again_in_its_pod_and_the_curve_is_that_of_a_run_without_the_kill(workplace):
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    victim = run.find("rank 1")
    victim.kill()
    other, attempt = ends_as_undisturbed(workplace, run, released)
    assert "rank 1 (pod " in attempt["lastRestartInPlace"]
    assert attempt["lastRestartInPlace"].endswith("was killed by signal 9")
    assert "1 restart in place" in run.stderr.splitlines()[-1]
    log = run.log(0, attempt=1)
    assert "[agent] restart 1 in place: rank 1 failed" in log
    assert "restartsInPlace" not in other.status["attempts"][0]
    assert not run.left()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_of_one_pod_restarts_those_of_all_pods_and_the_curve_is_that_of_a_run_without_the_kill(
    workplace: Workplace, victim: int
) -> None:
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released, pods=2))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    former = ranks_of(run)
    agents = [rank.ppid() for rank in former]
    former[victim].kill()
    run.until(lambda: is_next_life(run, former, agents), "both ranks have started again below the same agents")
    _, attempt = ends_as_undisturbed(workplace, run, released, pods=2, survivors=[{1 - victim}])
    assert attempt["lastRestartInPlace"].startswith(f"rank {victim} (pod ")
    assert f"-worker-{victim}-a1)" in attempt["lastRestartInPlace"]
    assert attempt["lastRestartInPlace"].endswith("was killed by signal 9")
    assert f"[agent] restart 1 in place: rank {victim} failed" in run.log(0, attempt=1)
    assert not run.left()


@pytest.mark.parametrize(
    ("why", "scarce", "parallelism"),
    [
        (r"the state has \d+ KiB, and beside its ranks the pod has 0 B of memory", True, {}),
        (r"no two ranks hold the same part of the model \(fsdp2\)", False, {"dataParallelShardDegree": 2}),
    ],
    ids=["memory", "shards"],
)
def test_ranks_go_on_from_the_checkpoint_where_the_other_has_left_no_state(
    workplace: Workplace, why: str, scarce: bool, parallelism: dict[str, int]
) -> None:
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released, scarce=scarce, **parallelism))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    victim = run.find("rank 1")
    victim.kill()
    ends_as_undisturbed(workplace, run, released, survivors=None, **parallelism)
    log = run.log(0, attempt=1)
    assert re.search(f"the state of no surviving rank is used: {why}\n", log), log
    assert f"resuming after step {2 * INTERVAL} " in log
    assert not run.left()


def ranks_of(run: Run) -> list[psutil.Process]:
    """The processes of both ranks, as far as they are there."""
    return [rank for rank in (run.find("rank 0"), run.find("rank 1")) if rank is not None]


def is_next_life(run: Run, former: list[psutil.Process], agents: list[int]) -> bool:
    """Whether both ranks have started again, below the agents that they had."""
    with contextlib.suppress(psutil.NoSuchProcess):
        now = ranks_of(run)
        new = len(now) == len(former) == 2 and not {rank.pid for rank in now} & {rank.pid for rank in former}
        return new and [rank.ppid() for rank in now] == agents
    return False


@pytest.mark.parametrize("victim", [0, 1])
def test_a_pod_that_is_lost_is_recreated_alone_and_the_curve_is_that_of_a_run_without_that(
    workplace: Workplace, victim: int
) -> None:
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released, pods=2))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    run.until(lambda: checkpoint_in_status(run) == 2 * INTERVAL, "the status has that checkpoint")
    former = ranks_of(run)
    agents = [agent_of(rank) for rank in former]
    agents[victim].kill()
    run.until(lambda: len(set(ranks_of(run)) - set(former)) == 2, "both ranks have started again")
    now = [agent_of(rank) for rank in ranks_of(run)]
    assert [new == old for new, old in zip(now, agents, strict=True)] == [victim != 0, victim != 1]
    _, attempt = ends_as_undisturbed(workplace, run, released, pods=2, restarts=1, survivors=[{1 - victim}])
    (replaced,) = attempt["replacements"]
    assert replaced["pod"].endswith(f"-worker-{victim}-a1")
    assert (replaced["reason"], replaced["checkpointStep"]) == ("RankFailed", 2 * INTERVAL)
    assert attempt["lastRestartInPlace"] == f"rank {victim} was lost with its former pod {replaced['pod']}"
    assert f"[agent] restart 1 in place: rank {victim} was lost with its pod" in run.log(0, attempt=1)
    assert "it alone is recreated, and the ranks of all pods wait for it" in run.stderr
    assert re.search(rf"random states after step \d+ are not known of ranks {victim}: new ones", run.log(0, attempt=1))
    assert not run.left()


def test_the_gang_is_recreated_where_no_agent_is_left_and_the_curve_is_that_of_a_run_without_that(
    workplace: Workplace,
) -> None:
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    agent_of(ranks_of(run)[0]).kill()
    run.until(lambda: f"resuming after step {2 * INTERVAL} " in run.log(0, attempt=2), "the next attempt resumes")
    released.touch()
    assert run.wait() == 0, run.stderr

    undisturbed = workplace.beside("undisturbed")
    other = undisturbed.run(job(undisturbed, released))
    assert other.exit_code == 0, other.stderr
    assert losses(run) == losses(other)
    assert sorted(losses(run)) == list(range(1, STEPS + 1))
    status = run.status
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 1)
    assert [entry.get("restartsInPlace") for entry in status["attempts"]] == [None, None]
    assert not run.left()


def losses(run: Run) -> dict[int, set[tuple[float, float]]]:
    """Loss and gradient norm of each step, of any attempt."""
    return {step: {(loss, norm) for loss, norm, _ in seen} for step, seen in curve(run).items()}
