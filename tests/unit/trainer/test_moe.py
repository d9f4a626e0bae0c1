"""Experts compute in every layout what they compute in one process: parameters, gradients, losses, evaluation."""

from typing import Any

import pytest

from tests.soak import SOAK
from tests.unit.trainer.comparisons import (
    ACCURACY,
    HELD_OUT_LOSS,
    LOSS,
    require_same,
    require_same_figures,
    require_same_gradients,
    series,
)
from tests.unit.trainer.layouts import (
    ADAMW,
    CONTEXT,
    FULL,
    OFFLOAD,
    PIPELINE,
    REPLICATE,
    RING,
    SELECTIVE,
    SGD,
    SHARD,
    TENSOR,
)
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

# Far more than one would use, so that a wrong auxiliary gradient is seen.
WEIGHTS = {"auxiliaryLossWeight": 0.5, "zLossWeight": 0.1}
COMMON = {"steps": 4, "logging": {"interval": 1}, "maxGradientNorm": 0.3, "data": user("double_tokens")}


def own(function: str, **config: Any) -> dict[str, Any]:
    """Model or data from user_moe.py."""
    return {"entrypoint": f"tests.unit.trainer.user_moe:{function}", "config": config}


def moe(**config: Any) -> dict[str, Any]:
    return {"model": user("double_moe_gpt", **(WEIGHTS | config))}


# 50 samples in batches of 24: the third batch is one of 2, so most ranks have nothing but padding in it. The load
# balancing loss is that of a microbatch of all ranks, so the number of microbatches is part of what is trained.
TRAININGS = {
    "SGD": small(**COMMON, **moe(), optimizer=SGD),
    "AdamW, accumulated": small(**COMMON, **moe(), optimizer=ADAMW, gradientAccumulationSteps=3),
    "uneven": small(**COMMON, **moe(uneven=True), optimizer=SGD, gradientAccumulationSteps=2),
    "one expert per token": small(**COMMON, **moe(expertsPerToken=1, tieWeights=False), optimizer=SGD),
    # On two ranks with the same expert, it is cut along its width.
    "two experts": small(**COMMON, **moe(experts=2, expertsPerToken=1), optimizer=ADAMW),
    # On two ranks with the same expert, it cannot be cut evenly.
    "two odd experts": small(**COMMON, model=own("double_tagger", count=2, width=5), optimizer=ADAMW),
    "a user's experts": small(**COMMON, model=own("double_tagger"), optimizer=SGD),
    "four microbatches": small(**COMMON, **moe(), optimizer=ADAMW, gradientAccumulationSteps=4),
    "four microbatches, untied": small(**COMMON, **moe(tieWeights=False), optimizer=SGD, gradientAccumulationSteps=4),
}
EXPERT = "expertParallelDegree"
EP2 = {SHARD: 2, EXPERT: 2}


def in_pipeline(schedule: str, microbatches: int = 4, **others: Any) -> dict[str, Any]:
    """Two ranks of a pipeline."""
    return {PIPELINE: 2, "pipeline": {"schedule": schedule, "microbatches": microbatches}, **others}


# What is one pass through a pipeline are microbatches one after the other in one process.
ONE_PASS = {"gradientAccumulationSteps": 1}

# ranks, training, parallelism, changes of the training
ALL_LAYOUTS = {
    **{
        f"pp2, {schedule}": (2, "four microbatches", in_pipeline(schedule), ONE_PASS | changes)
        for schedule, changes in {
            "GPipe": {},
            "1F1B": FULL,
            "Interleaved1F1B": {},
            "LoopedBFS": FULL,
            "InterleavedZeroBubble": FULL,
            "ZBVZeroBubble": {},
            "DualPipeV": {},
        }.items()
    },
    "pp2, 1F1B, two passes": (2, "four microbatches", in_pipeline("1F1B", 2), {"gradientAccumulationSteps": 2}),
    "pp2 x fsdp2 + ep2": (4, "four microbatches", in_pipeline("1F1B", **EP2), ONE_PASS | FULL),
    "pp2 x fsdp2 + ep2, Interleaved1F1B": (
        4,
        "four microbatches, untied",
        in_pipeline("Interleaved1F1B", **EP2),
        ONE_PASS,
    ),
    **{
        f"pp2 x fsdp2 + ep2, {schedule}": (
            4,
            "four microbatches, untied",
            in_pipeline(schedule, **EP2),
            ONE_PASS | changes,
        )
        for schedule, changes in {"InterleavedZeroBubble": FULL, "ZBVZeroBubble": OFFLOAD, "DualPipeV": {}}.items()
    },
    "pp2 x tp2 + ep2": (4, "four microbatches", in_pipeline("GPipe", **{TENSOR: 2, EXPERT: 2}), ONE_PASS),
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
    "fsdp4 + ep2, two experts": (4, "two experts", {SHARD: 4, EXPERT: 2}, {}),
    "fsdp4 + ep2, two odd experts": (4, "two odd experts", {SHARD: 4, EXPERT: 2}, {}),
    "dp2 x fsdp2 + ep2": (4, "AdamW, accumulated", {REPLICATE: 2, SHARD: 2, EXPERT: 2}, {}),
    "fsdp2 x tp2 + ep4": (4, "AdamW, accumulated", {SHARD: 2, TENSOR: 2, EXPERT: 4}, {}),
    "fsdp2 x tp2 + ep2, sequence": (4, "SGD", {SHARD: 2, TENSOR: 2, EXPERT: 2, "sequenceParallel": True}, {}),
    "cp2": (2, "SGD", {CONTEXT: 2}, SELECTIVE),
    "cp2, ring": (2, "AdamW, accumulated", {CONTEXT: 2, **RING}, FULL),
    "cp2 + ep2, ring, uneven": (2, "uneven", {CONTEXT: 2, EXPERT: 2, **RING}, OFFLOAD),
    "cp2 x dp2": (4, "SGD", {CONTEXT: 2, REPLICATE: 2}, FULL),
    "cp2 x fsdp2, ring": (4, "AdamW, accumulated", {CONTEXT: 2, SHARD: 2, **RING}, {}),
    "cp2 x fsdp2 + ep2": (4, "SGD", {CONTEXT: 2, SHARD: 2, EXPERT: 2}, FULL),
    "cp2 x fsdp2 + ep4, ring": (4, "AdamW, accumulated", {CONTEXT: 2, SHARD: 2, EXPERT: 4, **RING}, {}),
    "cp2 x dp2 + ep2": (4, "one expert per token", {CONTEXT: 2, REPLICATE: 2, EXPERT: 2}, {}),
    "cp2 x tp2 + ep2, sequence": (
        4,
        "AdamW, accumulated",
        {CONTEXT: 2, TENSOR: 2, EXPERT: 2, "sequenceParallel": True},
        FULL,
    ),
    "cp2 x tp2 + ep4, ring": (4, "SGD", {CONTEXT: 2, TENSOR: 2, EXPERT: 4, **RING}, {}),
    "cp4 + ep2, two experts": (4, "two experts", {CONTEXT: 4, EXPERT: 2}, {}),
    "pp2 x cp2 + ep2, ring": (4, "four microbatches", in_pipeline("1F1B", **{CONTEXT: 2, EXPERT: 2, **RING}), ONE_PASS),
    "pp2 x cp2, Interleaved1F1B": (
        4,
        "four microbatches",
        in_pipeline("Interleaved1F1B", **{CONTEXT: 2}),
        ONE_PASS | FULL,
    ),
}

# Every part of these is in another layout, too; tests/gpu has them.
LONG = {
    "dp2",
    "fsdp2 + ep2",
    "fsdp2 + ep2, uneven",
    "tp2 + ep2",
    "dp2, accumulated",
    "pp2, GPipe",
    "pp2, Interleaved1F1B",
    "pp2, InterleavedZeroBubble",
    "pp2, LoopedBFS",
    "pp2, DualPipeV",
    "pp2, 1F1B, two passes",
}
LAYOUTS = {name: layout for name, layout in ALL_LAYOUTS.items() if SOAK or name not in LONG}

CHANGES = {
    "fsdp4 + ep4 to dp2 x fsdp2 + ep2": (
        "AdamW, accumulated",
        {SHARD: 4, EXPERT: 4},
        {REPLICATE: 2, SHARD: 2, EXPERT: 2},
    ),
    "dp4 to fsdp4 + ep2": ("AdamW, accumulated", {}, {SHARD: 4, EXPERT: 2}),
    "cp2 x fsdp2 + ep4 to fsdp4 + ep2": ("SGD", {CONTEXT: 2, SHARD: 2, EXPERT: 4}, {SHARD: 4, EXPERT: 2}),
    "dp4 to cp2 x dp2 + ep2, ring": ("SGD", {}, {CONTEXT: 2, EXPERT: 2, **RING}),
    "pp2 x fsdp2 + ep2 to fsdp4 + ep4": ("SGD", in_pipeline("GPipe", 1, **EP2), {SHARD: 4, EXPERT: 4}),
    "dp4 to pp4 of one layer each": ("SGD", {}, {PIPELINE: 4, "pipeline": {"schedule": "GPipe", "microbatches": 1}}),
    "two odd experts, fsdp4 + ep2 to fsdp4": ("two odd experts", {SHARD: 4, EXPERT: 2}, {SHARD: 4}),
}

CAPACITY = small(**COMMON, **moe(capacityFactor=0.75), optimizer=SGD)


def single(precision: str) -> dict[str, Any]:
    model = user("double_moe_gpt", double=False, **WEIGHTS)
    return small(**COMMON, model=model, optimizer=SGD, precision=precision)


# What is not held against one process in float64: capacity, other number formats, refusals.
OTHERS = {
    "no auxiliary losses": (1, small(**COMMON, **moe(auxiliaryLossWeight=0, zLossWeight=0), optimizer=SGD), {}),
    "capacity": (1, CAPACITY, {}),
    "capacity, dp2": (2, CAPACITY, {}),
    "capacity, fsdp2 + ep2": (2, CAPACITY | FULL, EP2),
    "capacity, tp2 + ep2": (2, CAPACITY, {TENSOR: 2, EXPERT: 2}),
    "50 samples": (1, CAPACITY | {"globalBatchSize": 50}, {}),
    "50 samples and 14 of padding": (1, CAPACITY | {"globalBatchSize": 64}, {}),
    "25 and 25 samples": (2, TRAININGS["SGD"] | {"globalBatchSize": 50}, EP2),
    "32 samples, and 18 and 14 of padding": (2, TRAININGS["SGD"] | {"globalBatchSize": 64}, EP2),
    "FP32, dp2": (2, single("FP32"), {}),
    "FP32, fsdp2 + ep2": (2, single("FP32"), EP2),
    "FP16, dp2": (2, single("FP16"), {}),
    "BF16, dp2": (2, single("BF16"), {}),
    "BF16, fsdp2 + ep2": (2, single("BF16"), EP2),
    "no experts": (2, small(**COMMON, model=user("double_gpt"), optimizer=SGD), EP2),
    "three experts": (2, small(**COMMON, **moe(experts=3), optimizer=SGD), EP2),
    "a parameter for all": (2, small(**COMMON, model=own("double_tagger", shared=True), optimizer=SGD), EP2),
    "devices": (2, small(**COMMON, **moe(), optimizer=SGD), {"devicesPerProcess": 2}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of all cases above, which are run in one world for each number of ranks."""
    cases = {name: (1, [{"training": training}]) for name, training in TRAININGS.items()}
    for name, (ranks, training, at, changes) in LAYOUTS.items():
        cases[name] = (ranks, [{"training": TRAININGS[training] | changes, "parallelism": at}])
    for name, (ranks, training, at) in OTHERS.items():
        cases[name] = (ranks, [{"training": training, "parallelism": at}])
    for name, (training, first, second) in CHANGES.items():
        runs = [{"parallelism": first, "stop_after": 2}, {"parallelism": second}]
        cases[name] = (4, [{"training": TRAININGS[training], **run} for run in runs])
    found = {}
    for world in sorted({ranks for ranks, _ in cases.values()}):
        own_cases = {name: runs for name, (ranks, runs) in cases.items() if ranks == world}
        found |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, own_cases)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
class TestLayoutsEqualOneProcess:
    def test_parameters(self, results, layout):
        _, training, _, _ = LAYOUTS[layout]
        assert results[layout]["errors"] == [None]
        require_same(results[layout]["parameters"], results[training]["parameters"])

    def test_gradients_of_the_first_step(self, results, layout):
        _, training, _, _ = LAYOUTS[layout]
        expected = results[training]["gradients"]
        assert expected.keys() == results[training]["parameters"].keys()
        require_same_gradients(results[layout]["gradients"], expected)

    def test_metrics_of_every_step(self, results, layout):
        keys = [LOSS, "grad_norm", HELD_OUT_LOSS, ACCURACY]
        keys += [f"moe/{name}" for name in ("load_balancing_loss", "z_loss", "max_load_over_mean", "dropped_fraction")]
        require_same_figures(results[layout], results[LAYOUTS[layout][1]], keys, steps=COMMON["steps"])


def test_an_expert_without_tokens_stays_as_it_is(results):
    """And the busiest has every token: twice the mean load, with two of four experts per token."""
    for name in ("uneven", *(name for name, (_, training, _, _) in LAYOUTS.items() if training == "uneven")):
        contract = results[name]["parameters"]["blocks.0.feed_forward.experts.contract"]
        assert not contract[-1].any()
        assert contract[0].any()
        assert series(results[name], "moe/max_load_over_mean") == [2.0] * COMMON["steps"]


def test_the_auxiliary_losses_are_part_of_what_is_trained(results):
    """So that their equality above is not that of losses that nobody minimises."""
    with_them, without = results["SGD"], results["no auxiliary losses"]
    assert series(without, "grad_norm")[0] != pytest.approx(series(with_them, "grad_norm")[0], rel=1e-3)
    assert series(without, "moe/z_loss")[-1] > series(with_them, "moe/z_loss")[-1] * 1.001


@pytest.mark.parametrize("change", CHANGES)
def test_a_job_stopped_with_one_expert_degree_goes_on_with_another(results, change):
    stopped, ended = results[change]["errors"]
    assert "stopped after step 2, its checkpoint is written" in stopped
    assert ended is None
    training, _, _ = CHANGES[change]
    require_same(results[change]["parameters"], results[training]["parameters"])


@pytest.mark.parametrize(
    ("expected", "found"), [("capacity, dp2", "capacity, fsdp2 + ep2"), ("capacity", "capacity, tp2 + ep2")]
)
def test_what_is_dropped_depends_on_the_number_of_replicas_alone(results, expected, found):
    assert results[found]["errors"] == [None]
    assert series(results[expected], "moe/dropped_fraction")[0] > 0.1
    require_same_figures(results[found], results[expected], ("moe/dropped_fraction", "grad_norm", HELD_OUT_LOSS))
    require_same(results[found]["parameters"], results[expected]["parameters"])


@pytest.mark.parametrize(
    ("full", "padded"),
    [("50 samples", "50 samples and 14 of padding"), ("25 and 25 samples", "32 samples, and 18 and 14 of padding")],
)
def test_padding_counts_nowhere(results, full, padded):
    """Neither in the losses nor against an expert's capacity."""
    require_same(results[padded]["parameters"], results[full]["parameters"])
    keys = ("grad_norm", "moe/load_balancing_loss", "moe/dropped_fraction", "moe/max_load_over_mean")
    require_same_figures(results[padded], results[full], keys)


def test_other_replicas_drop_others(results):
    one, two = (series(results[name], "grad_norm")[0] for name in ("capacity", "capacity, dp2"))
    assert one != pytest.approx(two, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "within"),
    [("FP32, fsdp2 + ep2", 1e-5), ("FP16, dp2", 0.01), ("BF16, dp2", 0.05), ("BF16, fsdp2 + ep2", 0.05)],
)
def test_other_number_formats_come_close(results, case, within):
    """The gradient's norm has the auxiliary losses in it, which FP16 scales with the rest."""
    assert results[case]["errors"] == [None]
    for key, step in (("grad_norm", 0), ("loss_metrics/global_avg_loss", -1)):
        expected = series(results["FP32, dp2"], key)[step]
        assert series(results[case], key)[step] == pytest.approx(expected, rel=within)


DEGREE = "`parallelism.expertParallelDegree`"
REFUSED = {
    "no experts": f"{DEGREE} 2: the model Gpt has no layer of disttrain_trainer.moe.layer.MixtureOfExperts whose"
    " experts could be spread; leave the degree out",
    "three experts": f"{DEGREE}: 3 experts (parameter `blocks.0.feed_forward.experts.expand`) must be a multiple of 2",
    "a parameter for all": f"{DEGREE}: parameter `layer.experts.shift` has shape [6], expected a row for each of the 4"
    " experts",
    "devices": "`parallelism.devicesPerProcess`: the experts of the model Gpt want a process per device; leave it out",
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_whose_experts_cannot_be_spread(results, case):
    assert results[case]["errors"] == [f"InvalidConfiguration: {REFUSED[case]}"]
