"""A package that lies outside of this repository, as a user's does: its models in every layout that takes them."""

import os
from typing import Any

import pytest

from tests.unit.trainer.worlds import require_same, run_cases, small

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
# ranks, parallelism, changes of the training
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two devices that share the batch": (1, {"devicesPerProcess": 2}, {}),
    "layers on three devices": (1, {"devicesPerProcess": 3, "deviceMode": "Place"}, {}),
    "dp2": (2, {}, {}),
    "dp2, accumulated": (2, {}, {"gradientAccumulationSteps": 4}),
    "dp2, two devices each": (2, {"devicesPerProcess": 2}, {}),
    "dp2, placed layers": (2, {"devicesPerProcess": 2, "deviceMode": "Place"}, {}),
    "fsdp2": (2, {"dataParallelShardDegree": 2}, {}),
    "fsdp2, recomputed, offloaded": (
        2,
        {"dataParallelShardDegree": 2},
        {"activationCheckpointing": "Full", "offload": {"parameters": True}},
    ),
    "tp2": (2, {"tensorParallelDegree": 2}, {}),
    "tp2, recomputed": (2, {"tensorParallelDegree": 2}, {"activationCheckpointing": "Selective"}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    place = tmp_path_factory.mktemp("site")
    for name, text in PACKAGE.items():
        file = place / NAME / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(place)])
    found: dict[str, dict[str, Any]] = {}
    for world in (1, 2):
        cases = {
            name: [{"training": {**TRAINING, **changes}, "parallelism": parallelism}]
            for name, (ranks, parallelism, changes) in {"alone": (1, {}, {}), **LAYOUTS}.items()
            if ranks == world
        }
        # Fresh, for a forked one has read PYTHONPATH long ago.
        found |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, cases, fresh=True, PYTHONPATH=path)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_users_package_is_trained_as_in_one_process(results: dict[str, dict[str, Any]], layout: str) -> None:
    expected, found = results["alone"], results[layout]
    assert found["errors"] == [None]
    require_same(found["parameters"], expected["parameters"], TOLERANCE)
    for key in ("loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/accuracy"):
        figures = [[line[key] for line in one["metrics"] if key in line] for one in (found, expected)]
        assert len(figures[0]) == (1 if key.startswith("validation") else TRAINING["steps"])
        assert figures[0] == pytest.approx(figures[1], rel=TOLERANCE)


def test_training_moves_the_parameters(results: dict[str, dict[str, Any]]) -> None:
    """So that equality above is not that of standing still."""
    losses = [line["loss_metrics/global_avg_loss"] for line in results["alone"]["metrics"] if "lr" in line]
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
