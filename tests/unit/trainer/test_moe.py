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


def own(function: str, **config: Any) -> dict[str, Any]:
    """Model or data from user_moe.py."""
    return {"entrypoint": f"tests.unit.trainer.user_moe:{function}", "config": config}


def moe(**config: Any) -> dict[str, Any]:
    return {"model": user("double_moe_gpt", **WEIGHTS, **config)}


# 50 samples in batches of 24: the third batch is one of 2, so most ranks have nothing but padding in it. The load
# balancing loss is that of a microbatch of all ranks, so the number of microbatches is part of what is trained.
TRAININGS = {
    "SGD": small(**COMMON, **moe(), optimizer=SGD),
    "AdamW, accumulated": small(**COMMON, **moe(), optimizer=ADAMW, gradientAccumulationSteps=3),
    "uneven": small(**COMMON, **moe(uneven=True), optimizer=SGD, gradientAccumulationSteps=2),
    "one expert per token": small(**COMMON, **moe(expertsPerToken=1, tieWeights=False), optimizer=SGD),
    "a user's experts": small(**COMMON, model=own("double_tagger"), optimizer=SGD),
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
    "fsdp2 + ep2, uneven": (2, "uneven", {SHARD: 2, EXPERT: 2}, FULL),
    "fsdp4 + ep4, uneven": (4, "uneven", {SHARD: 4, EXPERT: 4}, {}),
    "fsdp2 + ep2 of a user's experts": (2, "a user's experts", {SHARD: 2, EXPERT: 2}, {}),
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
            "validation_metrics/global_avg_loss",
            "validation_metrics/accuracy",
        ],
    )
    def test_metrics_of_every_step(self, alone, together, layout, key):
        _, training, _, _ = LAYOUTS[layout]
        expected = [line[key] for line in alone[training]["metrics"] if key in line]
        found = [line[key] for line in together[layout]["metrics"] if key in line]
        assert len(expected) == (1 if key.startswith("validation") else COMMON["steps"])
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=1e-14)


def test_an_expert_without_tokens_stays_as_it_is(alone, together):
    """And the busiest has every token: twice the mean load, with two of four experts per token."""
    for result in (alone["uneven"], together["fsdp2 + ep2, uneven"], together["fsdp4 + ep4, uneven"]):
        contract = result["parameters"]["blocks.0.feed_forward.experts.contract"]
        assert not contract[-1].any()
        assert contract[0].any()
        loads = [line["moe/max_load_over_mean"] for line in result["metrics"] if "lr" in line]
        assert loads == [2.0] * COMMON["steps"]


def test_the_auxiliary_losses_are_part_of_what_is_trained(alone, tmp_path):
    """So that their equality above is not that of losses that nobody minimises."""
    without = small(
        **COMMON, model=user("double_moe_gpt", auxiliaryLossWeight=0, zLossWeight=0), optimizer=SGD
    )
    found = run_cases(tmp_path, 1, {"without": [{"training": without}]})["without"]
    with_them = alone["SGD"]
    assert norms(found)[0] != pytest.approx(norms(with_them)[0], rel=1e-3)
    assert last(found, "moe/z_loss") > last(with_them, "moe/z_loss") * 1.001


def norms(result: dict[str, Any]) -> list[float]:
    return [line["grad_norm"] for line in result["metrics"] if "grad_norm" in line]


def last(result: dict[str, Any], key: str) -> float:
    return [line[key] for line in result["metrics"] if key in line][-1]


CHANGES = {
    "fsdp4 + ep2 to fsdp4 + ep4": ({SHARD: 4, EXPERT: 2}, {SHARD: 4, EXPERT: 4}),
    "fsdp4 + ep4 to dp2 x fsdp2 + ep2": ({SHARD: 4, EXPERT: 4}, {REPLICATE: 2, SHARD: 2, EXPERT: 2}),
    "fsdp2 x tp2 + ep2 to dp4": ({SHARD: 2, TENSOR: 2, EXPERT: 2}, {}),
    "dp4 to fsdp4 + ep2": ({}, {SHARD: 4, EXPERT: 2}),
}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    training = TRAININGS["AdamW, accumulated"]
    cases = {
        name: [
            {"training": training, "parallelism": first, "stop_after": 2},
            {"training": training, "parallelism": second},
        ]
        for name, (first, second) in CHANGES.items()
    }
    return run_cases(tmp_path_factory.mktemp("resumed"), 4, cases)


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_stopped_with_one_expert_degree_goes_on_with_another(alone, resumed, change):
    stopped, ended = resumed[change]["errors"]
    assert "stopped after step 2, its checkpoint is written" in stopped
    assert ended is None
    for name, value in alone["AdamW, accumulated"]["parameters"].items():
        distance = torch.linalg.vector_norm(resumed[change]["parameters"][name] - value)
        assert distance <= TOLERANCE * torch.linalg.vector_norm(value), name


def half(model: dict[str, Any], precision: str) -> dict[str, Any]:
    return small(**COMMON, model=model, optimizer=SGD, precision=precision)


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What is not held against one process in float64: capacity, other number formats, refusals."""
    capacity = small(**COMMON, **moe(capacityFactor=0.75), optimizer=SGD)
    single = user("double_moe_gpt", double=False, **WEIGHTS)
    sharded = {SHARD: 2, EXPERT: 2}
    two = {
        "capacity, dp2": (capacity, {}),
        "capacity, fsdp2 + ep2": (capacity | FULL, sharded),
        "capacity, tp2 + ep2": (capacity, {TENSOR: 2, EXPERT: 2}),
        "FP32, dp2": (half(single, "FP32"), {}),
        "FP32, fsdp2 + ep2": (half(single, "FP32"), sharded),
        "FP16, dp2": (half(single, "FP16"), {}),
        "BF16, dp2": (half(single, "BF16"), {}),
        "BF16, fsdp2 + ep2": (half(single, "BF16"), sharded),
        "no experts": (small(**COMMON, model=user("double_gpt"), optimizer=SGD), sharded),
        "three experts": (small(**COMMON, model=user("double_moe_gpt", experts=3), optimizer=SGD), sharded),
        "a parameter for all": (small(**COMMON, model=own("double_tagger", shared=True), optimizer=SGD), sharded),
        "devices": (small(**COMMON, **moe(), optimizer=SGD), {"devicesPerProcess": 2}),
    }
    cases = {name: [{"training": training, "parallelism": at}] for name, (training, at) in two.items()}
    one = {"capacity": [{"training": capacity}]}
    folder = tmp_path_factory.mktemp("others")
    return run_cases(folder / "one", 1, one) | run_cases(folder / "two", 2, cases)


@pytest.mark.parametrize(
    ("expected", "found"),
    [("capacity, dp2", "capacity, fsdp2 + ep2"), ("capacity", "capacity, tp2 + ep2")],
)
def test_what_is_dropped_depends_on_the_number_of_replicas_alone(others, expected, found):
    assert others[found]["errors"] == [None]
    assert last(others[expected], "moe/dropped_fraction") > 0.1
    for key in ("moe/dropped_fraction", "grad_norm", "validation_metrics/global_avg_loss"):
        assert last(others[found], key) == pytest.approx(last(others[expected], key), rel=TOLERANCE)
    for name, value in others[expected]["parameters"].items():
        distance = torch.linalg.vector_norm(others[found]["parameters"][name] - value)
        assert distance <= TOLERANCE * torch.linalg.vector_norm(value), name


def test_other_replicas_drop_others(others):
    assert norms(others["capacity"])[0] != pytest.approx(norms(others["capacity, dp2"])[0], rel=1e-6)


@pytest.mark.parametrize(("case", "within"), [
    ("FP32, fsdp2 + ep2", 1e-5), ("FP16, dp2", 0.01), ("BF16, dp2", 0.05), ("BF16, fsdp2 + ep2", 0.05),
])  # fmt: skip
def test_other_number_formats_come_close(others, case, within):
    """The gradient's norm has the auxiliary losses in it, which FP16 scales with the rest."""
    assert others[case]["errors"] == [None]
    assert norms(others[case])[0] == pytest.approx(norms(others["FP32, dp2"])[0], rel=within)
    assert last(others[case], "loss_metrics/global_avg_loss") == pytest.approx(
        last(others["FP32, dp2"], "loss_metrics/global_avg_loss"), rel=within
    )


@pytest.mark.parametrize(("case", "message"), [
    ("no experts", "`parallelism.expertParallelDegree` 2: the model Gpt has no layer of disttrain_trainer.moe.layer."
     "MixtureOfExperts whose experts could be spread; leave the degree out"),
    ("three experts", "`parallelism.expertParallelDegree`: 3 experts (parameter `blocks.0.feed_forward.experts.expand`) "
     "must be a multiple of 2"),
    ("a parameter for all", "`parallelism.expertParallelDegree`: parameter `layer.experts.shift` has shape [6], "
     "expected a row for each of the 4 experts"),
    ("devices", "`parallelism.devicesPerProcess`: the experts of the model Gpt want a process per device; leave it out"),
])  # fmt: skip
def test_models_whose_experts_cannot_be_spread(others, case, message):
    assert others[case]["errors"] == [f"InvalidConfiguration: {message}"]
