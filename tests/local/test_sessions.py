"""The examples of loops of one's own, each as a user runs it, to its end."""

import shutil

import pytest
import yaml

from tools.cluster.paths import REPOSITORY

from .conftest import Run, Workplace

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
