"""Updates in one kernel, which GPUs ask for and CPUs have, too: what a layout trains to is the same with them.

What ranks hold parts of is where torch lacks such a kernel, or takes no mixture (optimizers.py).
"""

from typing import Any

import pytest

from tests.unit.trainer.layouts import PIPELINE, REPLICATE, SHARD, TENSOR
from tests.unit.trainer.worlds import require_same, run_cases, small, user

EXPERT = "expertParallelDegree"
OPTIMIZERS = {
    "SGD": {"name": "SGD", "learningRate": 0.1},
    "SGD, momentum": {"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "nesterov": True, "weightDecay": 0.1},
    "Adam": {"name": "Adam", "learningRate": 0.01, "weightDecay": 0.1},
    "AdamW": {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1},
    "AdamW of matrices": {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1, "weightDecayOn": "Matrices"},
}
COMMON = small(steps=3, data=user("double_tokens"), maxGradientNorm=0.3)
GPT = {**COMMON, "model": user("double_gpt")}
EXPERTS = {**COMMON, "model": user("double_moe_gpt")}
# ranks, training, parallelism
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "replicas": (2, GPT, {}),
    "shards": (2, GPT, {SHARD: 2}),
    "tensor": (2, GPT, {TENSOR: 2}),
    "pipeline": (2, GPT, {PIPELINE: 2}),
    "experts of one process": (2, EXPERTS, {}),
    "experts": (2, EXPERTS, {SHARD: 2, EXPERT: 2}),
    "experts of tensor groups": (2, EXPERTS, {TENSOR: 2, EXPERT: 2}),
    "replicas of shards": (4, GPT, {REPLICATE: 2, SHARD: 2}),
    "shards of tensor groups": (4, GPT, {SHARD: 2, TENSOR: 2}),
    "shards of experts": (4, EXPERTS, {SHARD: 4, EXPERT: 2}),
}
WHOLE = {"replicas", "pipeline", "experts of one process"}
"""Layouts whose ranks hold whole parameters alone."""
MIXED = {"tensor"}
"""Those whose ranks hold whole parameters beside parts."""
EVERY = {"replicas", "shards", "tensor"}
"""Those with every optimizer; the others have one of each kind."""
NAMES = {
    f"{layout}, {optimizer}, {ranks} ranks": (ranks, layout, optimizer)
    for layout, (ranks, *_) in LAYOUTS.items()
    for optimizer in OPTIMIZERS
    if layout in EVERY or optimizer in ("SGD, momentum", "AdamW of matrices")
}


def run(folders: pytest.TempPathFactory, ranks: int) -> dict[bool, dict[str, Any]]:
    """Results by whether kernels were asked for."""
    cases = {}
    for name, (size, layout, optimizer) in NAMES.items():
        if size == ranks:
            _, training, parallelism = LAYOUTS[layout]
            cases[name] = [{"training": {**training, "optimizer": OPTIMIZERS[optimizer]}, "parallelism": parallelism}]
    asked = run_cases(folders.mktemp("asked"), ranks, cases, FUSED="1")
    return {True: asked, False: run_cases(folders.mktemp("not-asked"), ranks, cases)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    return run(tmp_path_factory, 2)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Any]]:
    return run(tmp_path_factory, 4)


@pytest.mark.parametrize("name", NAMES)
def test_one_kernel_updates_what_torch_has_one_for_and_trains_to_the_same(
    request: pytest.FixtureRequest, name: str
) -> None:
    ranks, layout, optimizer = NAMES[name]
    results = request.getfixturevalue("two" if ranks == 2 else "four")
    found, expected = results[True][name], results[False][name]
    assert found["errors"] == expected["errors"] == [None]
    require_same(found["parameters"], expected["parameters"], 1e-9)
    fused = layout in WHOLE or (layout not in MIXED and not optimizer.startswith("SGD"))
    assert set(found["fused"]) == {fused}
    assert set(expected["fused"]) == {False}
