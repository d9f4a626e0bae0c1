"""Batch normalisation over all replicas is that of one process with all of the batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.suites import GATE
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, LOSS, require_same_figures
from tests.unit.trainer.norm_code import LAYERS, SIZES, STEPS, layer_of, run_layer
from tests.unit.trainer.worlds import run_cases, run_ranks, small

TOLERANCE = 1e-10
SYNC = {"dataParallel": {"syncBatchNorm": True}}


def code(function: str, **config: Any) -> dict[str, Any]:
    return {"entrypoint": f"tests.unit.trainer.norm_code:{function}", "config": config}


def distance(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    folder = tmp_path_factory.mktemp("layers")
    module = "tests.unit.trainer.norm_code"
    ended = run_ranks(folder, None, len(SIZES), module=module, RESULTS=str(folder))
    assert [rank.code for rank in ended] == [0] * len(SIZES), "\n".join(rank.err for rank in ended)
    return [torch.load(folder / f"{rank}.pt") for rank in range(len(SIZES))]


@pytest.mark.parametrize("name", LAYERS)
class TestLayersOfThreeRanksEqualThatOfOneProcess:
    def test_outputs_and_gradients_of_inputs(self, ranks: list[dict[str, dict[str, Tensor]]], name: str) -> None:
        whole = run_layer(layer_of(name), name, None)
        for step in range(STEPS):
            for what in (f"outputs {step}", f"input gradient {step}"):
                found = torch.cat([rank[name][what] for rank in ranks])
                assert distance(found, whole[what]) <= TOLERANCE, what

    def test_parameters_gradients_are_parts_of_a_sum(self, ranks, name):
        whole = run_layer(layer_of(name), name, None)
        parameters = [key for key in whole if key.startswith("gradient of")]
        assert len(parameters) == (0 if name == "not affine" else 2)
        for what in parameters:
            assert distance(sum(rank[name][what] for rank in ranks), whole[what]) <= TOLERANCE, what

    def test_running_statistics_are_alike_everywhere(self, ranks, name):
        whole = run_layer(layer_of(name), name, None)
        states = [key for key in whole if key.startswith("state")]
        assert len(states) == (1 if name == "without statistics" else 3)
        for what in states:
            for rank in ranks:
                assert torch.equal(rank[name][what], ranks[0][name][what]), what
                assert torch.allclose(rank[name][what], whole[what], rtol=TOLERANCE, atol=0), what


COMMON: dict[str, Any] = {"model": code("double_resnet"), "data": code("double_images"), "logging": {"interval": 1}}
PLAIN = small(**COMMON, steps=4)
ACCUMULATED = small(**COMMON, steps=4, gradientAccumulationSteps=2)
# ranks, training, parallelism
LAYOUTS = {
    "dp2": (2, PLAIN, SYNC),
    "dp2, accumulated": (2, ACCUMULATED, SYNC),
    "fsdp2": (2, PLAIN, {**SYNC, "dataParallelShardDegree": 2}),
    "dp2, placed layers": (2, PLAIN, {**SYNC, "devicesPerProcess": 2, "deviceMode": "Place"}),
    "dp2 x fsdp2": (4, PLAIN, {**SYNC, "dataParallelReplicateDegree": 2, "dataParallelShardDegree": 2}),
    "dp2, each its own": (2, PLAIN, {}),
}
BUILT_IN: dict[str, Any] = {
    "model": {
        "name": "resnet",
        "config": {"norm": "Batch", "width": 8, "blocks": [1], "inputChannels": 1, "outputSize": 5},
    },
    "data": code("images"),
    "logging": {"interval": 1},
    "evaluation": {"interval": 3},
}
SHARDS = {"dataParallelShardDegree": 2}
# parallelism, changes of the training: these cast weights beside statistics that stay as they are
CAST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fsdp2": (SHARDS, {}),
    "fsdp2, recomputed": (SHARDS, {"activationCheckpointing": "Full"}),
    "fsdp2, all replicas' batches": (SHARDS | SYNC, {}),
    "dp2, offloaded": ({}, {"offload": {"parameters": True}}),
}
# One shows it, and a CPU takes its time for FP16.
FORMATS = {"BF16": 2**-7} if GATE else {"BF16": 2**-7, "FP16": 2**-10}
"""How far a loss may be off, for each."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {"plain": [{"training": PLAIN}], "accumulated": [{"training": ACCUMULATED}]}
    cases["without"] = [{"training": {**PLAIN, "model": code("double_resnet", norm="Group")}, "parallelism": SYNC}]
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory, asked_for: Any) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    asked = {"dp2, each its own"} | asked_for("test_sync_batch_norm", "layout")
    for world in sorted({LAYOUTS[name][0] for name in LAYOUTS if name in asked}):
        cases = {
            name: [{"training": training, "parallelism": parallelism}]
            for name, (ranks, training, parallelism) in LAYOUTS.items()
            if ranks == world and name in asked
        }
        for precision in FORMATS if world == 2 else ():
            half = small(**BUILT_IN, steps=3, precision=precision)
            cases |= {precision: [{"training": half}], f"{precision} sync": [{"training": half, "parallelism": SYNC}]}
            for name, (parallelism, changes) in CAST.items():
                cases[f"{precision} {name}"] = [{"training": half | changes, "parallelism": parallelism}]
        results |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, cases)
    return results


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "dp2, each its own"])
def test_a_network_is_trained_as_in_one_process(alone, together, layout):
    expected, found = alone["accumulated" if "accumulated" in layout else "plain"], together[layout]
    assert found["errors"] == [None]
    assert found["parameters"].keys() == expected["parameters"].keys()
    assert sum("running_" in name for name in found["parameters"]) == 10
    for name, value in expected["parameters"].items():
        assert torch.allclose(found["parameters"][name], value, rtol=TOLERANCE, atol=1e-12), name
    require_same_figures(found, expected, (LOSS, "grad_norm", HELD_OUT_LOSS), steps=4, tolerance=TOLERANCE)


def test_without_it_each_normalises_its_part(alone, together):
    """So that equality above is the layer's doing."""
    name = "1.running_var"
    found, expected = (result["parameters"][name] for result in (together["dp2, each its own"], alone["plain"]))
    assert distance(found, expected) > 1e-4


def test_a_model_without_such_layers_is_refused(alone: dict[str, dict[str, Any]]) -> None:
    (error,) = alone["without"]["errors"]
    message = "InvalidConfiguration: `parallelism.dataParallel.syncBatchNorm`: Sequential has no BatchNorm layer"
    assert error.startswith(message)


@pytest.mark.parametrize("layout", CAST)
@pytest.mark.parametrize("precision", FORMATS)
def test_statistics_stay_whole_beside_weights_that_are_cast(together, precision, layout):
    """Replicas compute under autocast, which leaves the layer's weights as they are."""
    found = together[f"{precision} {layout}"]
    expected = together[f"{precision} sync" if "all replicas'" in layout else precision]
    assert found["errors"] == [None]
    statistics = {name: value for name, value in found["parameters"].items() if "running_" in name}
    assert len(statistics) == 6
    assert {value.dtype for value in found["parameters"].values() if value.is_floating_point()} == {torch.float32}
    for name, value in statistics.items():
        assert distance(value, expected["parameters"][name]) <= 4 * FORMATS[precision], name
    require_same_figures(found, expected, (LOSS, HELD_OUT_LOSS), tolerance=2 * FORMATS[precision])
