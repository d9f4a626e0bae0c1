"""A package that lies outside of this repository, as a user's does: its models in every layout that takes them."""

import os
from typing import Any

import pytest

from tests.unit.trainer.comparisons import ACCURACY, HELD_OUT_LOSS, LOSS, require_same, require_same_figures, series
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.worlds import run_cases, small

TOLERANCE = 1e-10

PACKAGE = {
    "__init__.py": "",
    "blocks.py": '''
from torch import nn


class Block(nn.Module):
    """[B, width] -> [B, width]"""

    def __init__(self, width):
        super().__init__()
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.contract(self.expand(x).tanh())
''',
    "models/__init__.py": "from .net import net\n",
    "models/net.py": """
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from ..blocks import Block


class Net(nn.Sequential):
    def tensor_plan(self, *, sequence=False, vocabulary=False):
        if sequence or vocabulary:
            raise ValueError("neither is possible here")
        blocks = [name for name, layer in self.named_children() if isinstance(layer, Block)]
        return {
            **{f"{name}.expand": ColwiseParallel() for name in blocks},
            **{f"{name}.contract": RowwiseParallel() for name in blocks},
        }

    def initialise_layer(self, layer):
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()


def net(width, depth):
    return Net(nn.Linear(6, width), *(Block(width) for _ in range(depth)), nn.Linear(width, 5)).double()
""",
    "data.py": """
from pathlib import Path

import torch
from torch.utils.data import TensorDataset


def samples():
    seed = int((Path(__file__).parent / "seed.txt").read_text())
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(61, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (61,), generator=generator)
    return TensorDataset(inputs[:50], targets[:50]), TensorDataset(inputs[50:], targets[50:])
""",
    "seed.txt": "5",
}
NAME = "a_users_company"
TRAINING = small(
    model={"entrypoint": f"{NAME}.models:net", "config": {"width": 8, "depth": 3}},
    data={"entrypoint": f"{NAME}.data:samples"},
    logging={"interval": 1},
    maxGradientNorm=0.3,
)
META = {"model": {**TRAINING["model"], "metaDevice": True}}


# ranks, parallelism, changes of the training
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two devices that share the batch": (1, {"devicesPerProcess": 2}, {}),
    "layers on three devices": (1, {"devicesPerProcess": 3, "deviceMode": "Place"}, {}),
    "dp2": (2, {}, {}),
    "fsdp2, recomputed": (2, {SHARD: 2}, {"activationCheckpointing": "Full"}),
    "fsdp2, without memory": (2, {SHARD: 2}, META),
    "tp2": (2, {TENSOR: 2}, {}),
    "pp2": (2, {PIPELINE: 2, "pipeline": {"schedule": "ZBVZeroBubble"}}, {}),
    "fsdp2 x tp2": (4, {SHARD: 2, TENSOR: 2}, {}),
    "pp2 x tp2": (4, {PIPELINE: 2, "pipeline": {"schedule": "Interleaved1F1B"}, TENSOR: 2}, {}),
}


def reference_of(changes: dict[str, Any]) -> str:
    """The case in one process: a model without memory gets other values at the start."""
    return "alone, without memory" if changes is META else "alone"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    place = tmp_path_factory.mktemp("site")
    for name, text in PACKAGE.items():
        file = place / NAME / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(place)])
    found: dict[str, dict[str, Any]] = {}
    alone = {reference_of(changes): (1, {}, changes) for changes in ({}, META)}
    for world in (1, 2, 4):
        cases = {
            name: [{"training": {**TRAINING, **changes}, "parallelism": parallelism}]
            for name, (ranks, parallelism, changes) in {**alone, **LAYOUTS}.items()
            if ranks == world
        }
        # One world is as the agent starts it; to start the others so would take most of their time.
        folder = tmp_path_factory.mktemp(f"world-of-{world}")
        found |= run_cases(folder, world, cases, fresh=world == 1, PYTHONPATH=path)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_users_package_is_trained_as_in_one_process(results: dict[str, dict[str, Any]], layout: str) -> None:
    expected, found = results[reference_of(LAYOUTS[layout][2])], results[layout]
    assert found["errors"] == [None]
    require_same(found["parameters"], expected["parameters"], TOLERANCE)
    keys = (LOSS, "grad_norm", HELD_OUT_LOSS, ACCURACY)
    require_same_figures(found, expected, keys, steps=TRAINING["steps"], tolerance=TOLERANCE)


def test_training_moves_the_parameters(results: dict[str, dict[str, Any]]) -> None:
    """So that equality above is not that of standing still."""
    losses = series(results["alone"])
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
