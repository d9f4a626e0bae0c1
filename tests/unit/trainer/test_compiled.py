"""What `training.compile` compiles as one."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from disttrain_api.builtin import GptConfig
from disttrain_api.training import Training
from disttrain_trainer.build import compiles_whole
from disttrain_trainer.data.batches import Microbatch
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.models.gpt.model import build
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.supervised import Supervised
from tests.unit.trainer.cases import config_of
from tests.unit.trainer.worlds import small

TRAINING = Training.model_validate(small(compile=True, loss={"labelSmoothing": 0.1}))


@pytest.fixture
def microbatch():
    tokens = torch.randint(16, (3, 9), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 2:] = IGNORED
    return Microbatch((inputs, targets), torch.tensor([1.0, 1.0, 0.0]), 10.0, 2)


def made(*, compiled: bool):
    """A task and its model; not in float64, of which torch 2.11 computes no compiled attention's gradient on a CPU."""
    torch.manual_seed(0)
    model = build(GptConfig(vocabulary_size=16, layers=1, heads=2, width=8, sequence_length=8))
    task = Supervised(TRAINING.model_copy(update={"compile": compiled}))
    task.use_loss_of(model)
    if compiled:
        for layer in model.layers():
            layer.compile()
        task.compile_with_model()
    return task, model


def test_model_and_loss_are_one_graph_that_computes_the_same(microbatch):
    counters.clear()
    found = []
    for compiled in (False, True):
        task, model = made(compiled=compiled)
        loss = task.loss(model, microbatch).sum
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    for plain, one in zip(*found, strict=True):
        torch.testing.assert_close(one, plain, rtol=1e-5, atol=1e-6)


def test_targets_that_do_not_fit_are_refused_as_without_it(microbatch):
    task, model = made(compiled=True)
    inputs, targets = microbatch.batch
    with pytest.raises(InvalidConfiguration, match=r"`training.loss.name` CrossEntropy: .* its targets \[3, 4\]"):
        task.loss(model, Microbatch((inputs, targets[:, :4]), microbatch.weights, 8.0, 2))


@pytest.mark.parametrize(
    ("ranks", "parallelism", "changes", "whole"),
    [
        (1, {}, {}, True),
        (1, {}, {"gradientAccumulationSteps": 2}, True),
        (1, {}, {"compile": False}, False),
        (2, {}, {}, False),
        (1, {"devicesPerProcess": 2}, {}, False),
        (1, {}, {"activationCheckpointing": "Selective"}, False),
        (1, {}, {"offload": {"activations": True}}, False),
        (1, {}, {"offload": {"parameters": True}}, False),
        (1, {"dataParallel": {"mode": "ParameterServer"}}, {}, False),
    ],
)
def test_it_is_whole_where_nothing_happens_between_layers(monkeypatch, ranks, parallelism, changes, whole):
    environment = {"RANK": "0", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run = {"training": small(**{"compile": True} | changes), "parallelism": parallelism}
    assert compiles_whole(config_of(Path("/nowhere"), run, 1)) is whole
