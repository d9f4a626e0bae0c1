"""Every example is what a user can run as it is: on this machine, to its end, having learned something."""

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from .conftest import DISTTRAIN, Run, Workplace

EXAMPLES = Path(__file__).parents[2] / "examples"
# Byte values are 0 to 255: this is what knowing nothing costs.
UNIFORM_BYTES = math.log(256)
# What the loss of a model of a user's is below for answers that are nearly sure.
SURE = 0.05
# What those need that are not for any machine.
ELSEWHERE = ("-gpu", "-cluster")
# test_training.py, test_collectives.py and the last test here have them, in more detail.
CORPORA = ("corpus", "document-mask")
RUN_ELSEWHERE = {"ddp", "collectives", "observed", *CORPORA}


def names() -> list[str]:
    found = (path.stem for path in EXAMPLES.glob("*.yaml"))
    return sorted(name for name in found if not name.endswith(ELSEWHERE) and name not in RUN_ELSEWHERE)


@pytest.mark.parametrize("name", names())
def test_an_example_runs_to_its_end_and_learns(name: str, workplace: Workplace) -> None:
    # The trainer looks for a user's modules from the folder it is started in, as in a checkout.
    shutil.copytree(EXAMPLES, workplace.folder / "examples")
    require_learned(workplace.run(EXAMPLES / f"{name}.yaml"), name)


def require_learned(run: Run, name: str) -> None:
    """Fails where the example's run did not end well, with all its steps, or knows too little."""
    assert run.exit_code == 0, run.stderr
    status = run.status
    assert status["phase"] == "Succeeded"
    assert status["restarts"] == 0
    training = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())["spec"]["training"]
    assert status["progress"]["step"] == training["steps"]
    figures = {metric["name"]: metric["value"] for metric in status["progress"]["metrics"]}
    if training["data"].get("name") in ("text", "corpus"):
        # Half of what knowing nothing costs: more than how often each byte occurs.
        assert figures["loss"] < 0.6 * UNIFORM_BYTES
    elif training["data"].get("name") == "chat":
        # Its answers have few different bytes, of which most follow from the question.
        assert figures["loss"] < 0.15 * UNIFORM_BYTES
    elif training.get("loss", {}).get("name") == "Model":
        assert figures["loss"] < SURE
    else:
        assert figures["accuracy"] >= 0.9


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_example_learns_from_what_its_first_lines_prepare(name: str, workplace: Workplace) -> None:
    shutil.copytree(EXAMPLES.parent / "docs", workplace.folder / "docs")
    (arguments,) = (
        line.removeprefix("# disttrain ")
        for line in (EXAMPLES / f"{name}.yaml").read_text().splitlines()
        if line.startswith("# disttrain data")
    )
    subprocess.run([*DISTTRAIN, *shlex.split(arguments)], cwd=workplace.folder, check=True)
    require_learned(workplace.run(EXAMPLES / f"{name}.yaml"), name)


def test_the_observed_example_shows_its_network_its_steps_and_its_figures(workplace: Workplace) -> None:
    run = workplace.run(EXAMPLES / "observed.yaml")
    require_learned(run, "observed")
    assert "preflight: data are right between 2 ranks" in run.log(0, attempt=1)
    metrics = run.home / "metrics"
    for rank in (0, 1):
        trace = json.loads((metrics / "profile" / f"rank-{rank}-step-20.json").read_text())
        names = {event["name"] for event in trace["traceEvents"] if "name" in event}
        assert len({name for name in names if name.startswith("ProfilerStep#")}) == 3
        assert "aten::addmm" in names
    assert list((metrics / "tensorboard").glob("events.*"))
    steps = [json.loads(line)["step"] for line in (metrics / "metrics.jsonl").read_text().splitlines()]
    assert set(range(5, 101, 5)) <= set(steps)
