"""Experts compute in every layout what they compute in one process: parameters, losses, gradient norms, evaluation."""

from typing import Any

import pytest
import torch

from tests.unit.trainer.worlds import run_cases, small, user

TOLERANCE = 1e-10

ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
# Far more than one would use, so that a wrong auxiliary gradient is seen.
WEIGHTS = {"auxiliaryLossWeight": 0.5, "zLossWeight": 0.1}
COMMON = {"steps": 4, "logging": {"interval": 1}, "maxGradientNorm": 0.3, "data": user("double_tokens")}


def moe(**config: Any) -> dict[str, Any]:
    return {"model": user("double_moe_gpt", **WEIGHTS, **config)}


# 50 samples in batches of 24: the third batch is one of 2, so most ranks have nothing but padding in it. The load
# balancing loss is that of a microbatch of all ranks, so the number of microbatches is part of what is trained.
TRAININGS = {
    "SGD": small(**COMMON, **moe(), optimizer=SGD),
    "AdamW, accumulated": small(**COMMON, **moe(), optimizer=ADAMW, gradientAccumulationSteps=3),
    "one expert per token": small(**COMMON, **moe(expertsPerToken=1, tieWeights=False), optimizer=SGD),
}
SHARD = "dataParallelShardDegree"
TENSOR = "tensorParallelDegree"
REPLICATE = "dataParallelReplicateDegree"
EXPERT = "expertParallelDegree"
FULL = {"activationCheckpointing": "Full"}
SELECTIVE = {"activationCheckpointing": "Selective"}
OFFLOAD = {"offload": {"parameters": True, "activations": True}}

# ranks, training, parallelism, changes of the training
LAYOUTS = {
    "dp2": (2, "SGD", {}, SELECTIVE),
    "dp2, accumulated": (2, "AdamW, accumulated", {}, {}),
    "fsdp2": (2, "AdamW, accumulated", {SHARD: 2}, FULL),
    "fsdp2 + ep2": (2, "SGD", {SHARD: 2, EXPERT: 2}, {}),
    "fsdp2 + ep2, accumulated": (2, "AdamW, accumulated", {SHARD: 2, EXPERT: 2}, FULL),
    "fsdp2 + ep2, offloaded": (2, "one expert per token", {SHARD: 2, EXPERT: 2}, OFFLOAD | SELECTIVE),
    "tp2": (2, "SGD", {TENSOR: 2, "sequenceParallel": True}, {}),
    "tp2 + ep2": (2, "one expert per token", {TENSOR: 2, EXPERT: 2}, {}),
    "fsdp4 + ep2": (4, "AdamW, accumulated", {SHARD: 4, EXPERT: 2}, {}),
    "fsdp4 + ep4": (4, "SGD", {SHARD: 4, EXPERT: 4}, {}),
    "dp2 x fsdp2 + ep2": (4, "AdamW, accumulated", {REPLICATE: 2, SHARD: 2, EXPERT: 2}, {}),
    "fsdp2 x tp2 + ep4": (4, "AdamW, accumulated", {SHARD: 2, TENSOR: 2, EXPERT: 4}, {}),
    "fsdp2 x tp2 + ep2, sequence": (4, "SGD", {SHARD: 2, TENSOR: 2, EXPERT: 2, "sequenceParallel": True}, {}),
    "dp2 x tp2 + ep2": (4, "SGD", {REPLICATE: 2, TENSOR: 2, EXPERT: 2}, {}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = {name: [{"training": training}] for name, training in TRAININGS.items()}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    results = {}
    for world in sorted({ranks for ranks, *_ in LAYOUTS.values()}):
        cases = {
            name: [{"training": {**TRAININGS[training], **changes}, "parallelism": parallelism}]
            for name, (ranks, training, parallelism, changes) in LAYOUTS.items()
            if ranks == world
        }
        results |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, cases)
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayoutsEqualOneProcess:
    def test_parameters(self, alone, together, layout):
        _, training, _, _ = LAYOUTS[layout]
        expected, found = alone[training]["parameters"], together[layout]["parameters"]
        assert together[layout]["errors"] == [None]
        assert expected.keys() == found.keys()
        for parameter, value in expected.items():
            size = torch.linalg.vector_norm(value)
            assert size > 0, f"{parameter} is zero: nothing to compare with"
            distance = torch.linalg.vector_norm(found[parameter] - value) / size
            assert distance <= TOLERANCE, f"{parameter} differs by {distance}"

    @pytest.mark.parametrize(
        "key",
        [
            "loss_metrics/global_avg_loss",
            "grad_norm",
            "moe/load_balancing_loss",
            "moe/z_loss",
            "moe/max_load_over_mean",
            "moe/dropped_fraction",
            "validation_metrics/loss",
            "validation_metrics/accuracy",
        ],
    )
    def test_metrics_of_every_step(self, alone, together, layout, key):
        _, training, _, _ = LAYOUTS[layout]
        expected = [line[key] for line in alone[training]["metrics"] if key in line]
        found = [line[key] for line in together[layout]["metrics"] if key in line]
        assert len(expected) == (1 if key.startswith("validation") else COMMON["steps"])
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=1e-14)
