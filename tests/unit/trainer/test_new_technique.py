"""What a new technique touches: its own module, a line in strategies/choose.py, a rule. docs/extending.md shows it."""

import re
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from disttrain_api.manifest import of_object
from disttrain_api.rules import RULES
from disttrain_trainer.runtime.randomness import seed_everything
from tests.builders import a_manifest
from tests.unit.trainer import sharpness_aware
from tests.unit.trainer.comparisons import require_same, require_same_bits, series
from tests.unit.trainer.sharpness_aware import RADIUS, RULE
from tests.unit.trainer.user_code import double_mlp, double_samples
from tests.unit.trainer.worlds import run_cases, small
from tools.cluster.paths import REPOSITORY

RATE, STEPS = 0.1, 4
OPTIMIZER = {"entrypoint": "tests.unit.trainer.sharpness_aware:SharpnessAwareSgd", "learningRate": RATE}
# All samples in each step, in whatever order.
TRAINING = small(steps=STEPS, globalBatchSize=50, optimizer=OPTIMIZER, logging={"interval": 1})
LAYOUTS = {"dp2": {}, "fsdp2": {"dataParallelShardDegree": 2}}
RANK = "tests.unit.trainer.sharpness_aware_rank"


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    cases = {name: [{"training": TRAINING, "parallelism": parallelism}] for name, parallelism in LAYOUTS.items()}
    shards = {"training": TRAINING, "parallelism": LAYOUTS["fsdp2"]}
    cases["resumed"] = [{**shards, "stop_after": 2}, shards]
    return run_cases(tmp_path_factory.mktemp("together"), 2, cases, module=RANK)


def reference():
    """Algorithm 1 of the paper, on all samples."""
    seed_everything(0)
    model = double_mlp()
    inputs, targets = double_samples()[0].tensors
    parameters, losses = list(model.parameters()), []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(inputs), targets)
        losses.append(loss.item())
        ascent = torch.autograd.grad(loss, parameters)
        norm = torch.stack([one.square().sum() for one in ascent]).sum().sqrt()
        near = {
            name: one + RADIUS * up / norm for (name, one), up in zip(model.named_parameters(), ascent, strict=True)
        }
        outputs = torch.func.functional_call(model, near, (inputs,))
        descent = torch.autograd.grad(functional.cross_entropy(outputs, targets), parameters)
        with torch.no_grad():
            for one, down in zip(parameters, descent, strict=True):
                one -= RATE * down
    return {name: one.detach() for name, one in model.named_parameters()}, losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_takes_the_steps_in_each_layout(together, layout):
    parameters, losses = reference()
    assert together[layout]["errors"] == [None]
    require_same(together[layout]["parameters"], parameters)
    assert series(together[layout]) == pytest.approx(losses, rel=1e-10)


def test_it_is_stopped_and_resumed_as_others_are(together):
    stopped, ended = together["resumed"]["errors"]
    assert "stopped after step 2, its checkpoint is written" in stopped
    assert ended is None
    require_same_bits(together["resumed"]["parameters"], together["fsdp2"]["parameters"])


def test_its_rule_refuses_what_it_is_not_built_for():
    assert RULE.id not in {rule.id for rule in RULES}
    layouts = ({}, {"pipelineParallelDegree": 1}, {"pipelineParallelDegree": 2})
    found = [
        RULE.problem(of_object(a_manifest("a", parallelism=one, training={"optimizer": OPTIMIZER})).spec)
        for one in layouts
    ]
    assert found == [None, None, RULE.sentence]
    assert RULE.validation()["message"] == RULE.sentence


def test_the_page_shows_this_code():
    page = (REPOSITORY / "docs" / "extending.md").read_text().split("## A technique of the trainer")[1]
    source = Path(sharpness_aware.__file__).read_text()
    shown = re.findall(r"```python\n(.*?)```", page.split("\n## ")[0], re.DOTALL)
    assert len(shown) == 2
    assert [block for block in shown if block not in source] == []
