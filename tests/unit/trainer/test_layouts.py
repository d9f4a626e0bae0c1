"""Every layout of the mesh computes what one process computes: parameters, losses, gradient norms, evaluation."""

import pytest
import torch

from tests.unit.trainer.worlds import run_cases, small, user

TOLERANCE = 1e-10

ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
COMMON = {"steps": 5, "logging": {"interval": 1}, "maxGradientNorm": 0.3}
TOKENS = user("double_tokens")
GPT = {"model": user("double_gpt"), "data": TOKENS}

# 50 samples in batches of 24: the third batch is one of 2, so most ranks have nothing but padding in it.
TRAININGS = {
    "gpt, SGD": small(**COMMON, **GPT, optimizer=SGD),
    "gpt, AdamW": small(**COMMON, **GPT, optimizer=ADAMW),
    "gpt, untied, smoothed": small(
        **COMMON, optimizer=SGD, loss={"labelSmoothing": 0.1}, data=TOKENS, model=user("double_gpt", tieWeights=False)
    ),
    "mlp, SGD": small(**COMMON, optimizer=SGD, model=user("double_builtin_mlp")),
}
SHARD = "dataParallelShardDegree"
TENSOR = "tensorParallelDegree"
REPLICATE = "dataParallelReplicateDegree"
FULL = {"activationCheckpointing": "Full"}
SELECTIVE = {"activationCheckpointing": "Selective"}
OFFLOAD = {"offload": {"parameters": True, "activations": True}}
ACCUMULATE = {"gradientAccumulationSteps": 4}

# ranks, training, parallelism, changes of the training
LAYOUTS = {
    "fsdp2": (2, "gpt, SGD", {SHARD: 2}, {}),
    "fsdp2, AdamW, accumulated": (2, "gpt, AdamW", {SHARD: 2}, ACCUMULATE),
    "fsdp2, recomputed": (2, "gpt, AdamW", {SHARD: 2}, FULL),
    "fsdp2, offloaded": (2, "gpt, AdamW", {SHARD: 2}, OFFLOAD),
    "fsdp2 of an mlp": (2, "mlp, SGD", {SHARD: 2}, ACCUMULATE),
    "dp2, offloaded": (2, "gpt, SGD", {}, OFFLOAD | ACCUMULATE),
    "dp2, recomputed": (2, "gpt, SGD", {}, SELECTIVE | {"offload": {"activations": True}}),
    "fsdp2, compiled": (2, "mlp, SGD", {SHARD: 2}, {"compile": True}),
    "tp2": (2, "gpt, SGD", {TENSOR: 2}, {}),
    "tp2, AdamW, accumulated": (2, "gpt, AdamW", {TENSOR: 2}, ACCUMULATE | FULL),
    "tp2, sequence": (2, "gpt, AdamW", {TENSOR: 2, "sequenceParallel": True}, {}),
    "tp2, vocabulary": (2, "gpt, untied, smoothed", {TENSOR: 2, "vocabularyParallel": True}, {}),
    "tp2 of an mlp": (2, "mlp, SGD", {TENSOR: 2}, {}),
    "one process, two devices": (1, "mlp, SGD", {"devicesPerProcess": 2}, ACCUMULATE),
    "one process, five devices": (1, "gpt, SGD", {"devicesPerProcess": 5}, {"microBatchSize": 3}),
    "one process, placed layers": (1, "mlp, SGD", {"devicesPerProcess": 3, "deviceMode": "Place"}, {}),
    "dp2, two devices each": (2, "mlp, SGD", {"devicesPerProcess": 2}, ACCUMULATE),
    "dp2, placed layers": (2, "mlp, SGD", {"devicesPerProcess": 2, "deviceMode": "Place"}, {}),
    "dp2 x fsdp2": (4, "gpt, SGD", {REPLICATE: 2, SHARD: 2}, {"gradientAccumulationSteps": 2}),
    "dp2 x tp2": (4, "gpt, AdamW", {REPLICATE: 2, TENSOR: 2}, ACCUMULATE),
    "fsdp2 x tp2": (4, "gpt, AdamW", {SHARD: 2, TENSOR: 2}, {}),
    "fsdp2 x tp2, everything": (
        4,
        "gpt, untied, smoothed",
        {SHARD: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
        ACCUMULATE | FULL | OFFLOAD,
    ),
    "tp4": (4, "gpt, SGD", {TENSOR: 4, "vocabularyParallel": True}, {}),
    "fsdp4": (4, "gpt, untied, smoothed", {SHARD: 4}, {}),
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

    @pytest.mark.parametrize("key", ["loss_metrics/global_avg_loss", "grad_norm", "validation_metrics/accuracy"])
    def test_metrics_of_every_step(self, alone, together, layout, key):
        _, training, _, _ = LAYOUTS[layout]
        expected = [line[key] for line in alone[training]["metrics"] if key in line]
        found = [line[key] for line in together[layout]["metrics"] if key in line]
        assert len(expected) == (1 if key.startswith("validation") else COMMON["steps"])
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=1e-14)


def test_training_moves_the_parameters(alone):
    """So that equality above is not that of standing still."""
    for name in TRAININGS:
        losses = [line["loss_metrics/global_avg_loss"] for line in alone[name]["metrics"] if "lr" in line]
        assert losses[-1] != pytest.approx(losses[0], rel=1e-3)


CHANGES = {
    "fsdp4 to dp2 x tp2": ({SHARD: 4}, {REPLICATE: 2, TENSOR: 2}),
    "dp2 x tp2 to fsdp4": ({REPLICATE: 2, TENSOR: 2}, {SHARD: 4}),
    "dp4 to fsdp2 x tp2": ({}, {SHARD: 2, TENSOR: 2}),
    "tp4 to dp4": ({TENSOR: 4}, {}),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    training = TRAININGS["gpt, AdamW"]
    cases = {
        name: [
            {"training": training, "parallelism": first, "stop_after": 2},
            {"training": training, "parallelism": second},
        ]
        for name, (first, second) in CHANGES.items()
    }
    return run_cases(tmp_path_factory.mktemp("resumed"), 4, cases)


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_stopped_in_one_layout_goes_on_in_another(alone, resumed, change):
    stopped, ended = resumed[change]["errors"]
    assert "stopped after step 2, its checkpoint is written" in stopped
    assert ended is None
    for name, value in alone["gpt, AdamW"]["parameters"].items():
        distance = torch.linalg.vector_norm(resumed[change]["parameters"][name] - value)
        assert distance <= TOLERANCE * torch.linalg.vector_norm(value), name
