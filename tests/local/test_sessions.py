"""The examples of loops of one's own, each as a user runs it, to its end."""

import shutil

import pytest
import yaml

from disttrain.errors import CommandError
from disttrain.local.folder import RunFolder
from disttrain.local_client import LocalClient
from disttrain.stacks.of_run import stacks_of_run
from tests.builders import a_claim_template
from tools.cluster.paths import REPOSITORY

from .conftest import Run, Workplace, script

EXAMPLES = REPOSITORY / "examples"


def run_example(workplace: Workplace, name: str) -> tuple[Run, dict[str, float]]:
    """The run of an example, and the figures in its status."""
    shutil.copytree(EXAMPLES, workplace.folder / "examples")
    run = workplace.run(EXAMPLES / "sessions" / f"{name}.yaml")
    assert run.exit_code == 0, run.stderr + run.log(0, 1)
    progress = run.status["progress"]
    assert progress["step"] == progress["totalSteps"]
    return run, {metric["name"]: metric["value"] for metric in progress["metrics"]}


@pytest.mark.parametrize("name", ["gan", "rl"])
def test_a_session_of_an_example_ends_with_its_figures_and_its_checkpoint(workplace: Workplace, name: str) -> None:
    run, figures = run_example(workplace, name)
    if name == "gan":
        # Before the first step the points lie around the middle, 2 away from the circle.
        assert figures["distance"] < 1.5
    else:
        # Who walks at random reaches the goal in less than two thirds of the episodes.
        assert figures["reward"] > 0.7
    assert run.status["checkpoint"]["step"] == run.status["progress"]["step"]
    assert (run.home / "metrics" / "loss.png").exists()


def test_a_torchrun_script_that_only_gained_a_report_has_its_figures_in_the_status(workplace: Workplace) -> None:
    run, figures = run_example(workplace, "report")
    assert figures == {"rate": pytest.approx(0.1)}
    assert run.status["progress"]["loss"] < 1.0
    assert yaml.safe_load((EXAMPLES / "sessions" / "report.yaml").read_text())["spec"].get("training") is None


HELD = """
import pathlib, time
import torch
import disttrain

def where_it_waits(name):
    pathlib.Path(f"{name}-{session.rank}").touch()
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

with disttrain.session(steps=9, checkpoint_interval=100) as session:
    model, optimizer = session.prepare(model := torch.nn.Linear(2, 1), torch.optim.SGD(model.parameters(), lr=0.1))
    session.restore(model=model, optimizer=optimizer)
    while not session.finished:
        session.step(loss=0.0)
        if session.completed in (3, 6):
            where_it_waits(f"after-{session.completed}")
"""


@pytest.mark.parametrize(("strategy", "pods"), [("Recreate", 1), ("Recreate", 2), ("InPlace", 1)])
def test_all_ranks_of_a_session_below_torchrun_give_their_stacks_and_write_a_checkpoint_on_request(
    workplace: Workplace, strategy: str, pods: int
) -> None:
    run = workplace.start(
        workplace.write(
            "own",
            training=None,
            workers={"replicas": pods, "processesPerPod": 2 // pods, "command": ["torchrun", script(workplace, HELD)]},
            storage=a_claim_template(),
            runPolicy={"restartStrategy": strategy},
        )
    )

    def stacks(rank: int) -> str:
        try:
            return stacks_of_run(RunFolder(run.home), rank, ranks_per_pod=2 // pods)
        except CommandError:
            return ""

    for rank in (0, 1):
        run.until(lambda rank=rank: (run.folder / f"after-3-{rank}").exists(), f"rank {rank} has taken three steps")
        run.until(lambda rank=rank: "where_it_waits" in stacks(rank), f"rank {rank} gives its stacks")
    # The first pod's ranks alone are asked.
    LocalClient(runs=run.folder / "disttrain-runs").checkpoint("own")
    (run.folder / "after-3").touch()
    run.until((run.folder / "after-6-1").exists, "three more")
    (kept,) = run.home.glob("storage/own-*/step-*")
    assert kept.name in ("step-4", "step-5"), "it was asked for after step 3"
    (run.folder / "after-6").touch()
    assert run.wait() == 0, run.stderr + run.log(0, 1)
    assert run.status["attempt"] == 1, "nobody was disturbed"
