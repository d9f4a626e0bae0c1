"""Random kills in a run: its steps are those of a run without kills, and its status names each kill.

The ranks hold the whole model, or parts of it.
"""

import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.builders import a_claim_template
from tests.chance import chance
from tests.chaos import MOST_STEPS, Chaos, has_the_steps_of, says_what_happened

from .conftest import Run, Workplace
from .test_surviving_parts import HYBRID, STAGES, TENSORS

KILLS_OF_A_ROUND = 15
PER_POD = 2
INTERVAL, BATCH = 3, 16


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


def adds_up(run: Run, last: int) -> None:
    """Assert that each second from the job's creation to its end is in one state of its goodput."""
    status, job = run.status, yaml.safe_load((run.home / "status.yaml").read_text())
    goodput = status["goodput"]
    spent = {entry["state"]: entry["seconds"] for entry in goodput["spent"]}
    assert goodput["since"] == job["metadata"]["creationTimestamp"]
    assert (goodput["updateTime"], goodput.get("state")) == (status["completionTime"], None)
    assert sum(spent.values()) == (_time(goodput["updateTime"]) - _time(goodput["since"])).total_seconds()
    assert set(spent) <= {"Starting", "Restoring", "Training", "Redoing", "Saving", "Evaluating", "Restarting"}
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
    chaos = Chaos(run, pods, PER_POD, random)
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
    has_the_steps_of(run, other, last, INTERVAL)
    says_what_happened(run, chaos, last)
    adds_up(run, last)
