"""Every example is what a user can run as it is: on this machine, to its end, having learned something."""

import math
import shutil
from pathlib import Path

import pytest
import yaml

from .conftest import Workplace

EXAMPLES = Path(__file__).parents[2] / "examples"
# Byte values are 0 to 255: this is what knowing nothing costs.
UNIFORM_BYTES = math.log(256)
# What those need that are not for any machine.
ELSEWHERE = ("-gpu", "-cluster")
# test_training.py and test_collectives.py have them, in more detail.
RUN_ELSEWHERE = {"ddp", "collectives"}


def names() -> list[str]:
    found = (path.stem for path in EXAMPLES.glob("*.yaml"))
    return sorted(name for name in found if not name.endswith(ELSEWHERE) and name not in RUN_ELSEWHERE)


@pytest.mark.parametrize("name", names())
def test_an_example_runs_to_its_end_and_learns(name: str, workplace: Workplace) -> None:
    # The trainer looks for a user's modules from the folder it is started in, as in a checkout.
    shutil.copytree(EXAMPLES, workplace.folder / "examples")
    run = workplace.run(EXAMPLES / f"{name}.yaml")
    assert run.exit_code == 0, run.stderr
    status = run.status
    assert status["phase"] == "Succeeded"
    assert status["restarts"] == 0
    training = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["spec"]["training"]
    assert status["progress"]["step"] == training["steps"]
    figures = {metric["name"]: metric["value"] for metric in status["progress"]["metrics"]}
    if training["data"].get("name") == "text":
        # Half of what knowing nothing costs: more than how often each byte occurs.
        assert figures["loss"] < 0.6 * UNIFORM_BYTES
    else:
        assert figures["accuracy"] >= 0.9
