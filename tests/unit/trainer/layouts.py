"""Layouts of the mesh, and what is trained in each of them: the cases of test_layouts.py."""

import pytest

from tests.soak import SOAK
from tests.suites import GATE
from tests.unit.trainer.worlds import run_cases, run_layouts, small, user

ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
MUON = {"name": "Muon", "learningRate": 0.02, "weightDecay": 0.1, "weightDecayOn": "Matrices"}
MUON |= {"groups": [{"pattern": "blocks.1.*", "learningRateFactor": 0.5}]}
ADAFACTOR = {"name": "Adafactor", "learningRate": 0.05, "weightDecay": 0.1}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
COMMON = {"steps": 3, "logging": {"interval": 1}, "maxGradientNorm": 0.3}
TOKENS = user("double_tokens")
GPT = {"model": user("double_gpt"), "data": TOKENS}
# The built-in resnet with group normalisation.
IMAGES = {
    "model": {"entrypoint": "tests.unit.trainer.norm_code:double_resnet", "config": {"norm": "Group"}},
    "data": {"entrypoint": "tests.unit.trainer.norm_code:double_images"},
}

# 50 samples in batches of 24: the third and last batch is one of 2, so most ranks have nothing but padding in it.
TRAININGS = {
    "gpt, AdamW of matrices": small(**COMMON, **GPT, optimizer=ADAMW | {"weightDecayOn": "Matrices"}),
    "gpt, SGD": small(**COMMON, **GPT, optimizer=SGD),
    "gpt, FP32, 20 steps": small(
        **COMMON | {"steps": 20}, data=TOKENS, model=user("double_gpt", double=False), optimizer=SGD
    ),
    "gpt of one head, SGD": small(**COMMON, data=TOKENS, model=user("double_gpt", heads=1), optimizer=SGD),
    "gpt, AdamW": small(**COMMON, **GPT, optimizer=ADAMW),
    "gpt, untied, smoothed": small(
        **COMMON,
        optimizer=SGD,
        loss={"labelSmoothing": 0.1},
        data=TOKENS,
        model=user("double_gpt", tieWeights=False, bias=False),
    ),
    "deep gpt, AdamW": small(**COMMON, data=TOKENS, model=user("double_gpt", layers=6), optimizer=ADAMW),
    "deep gpt, untied": small(
        **COMMON, data=TOKENS, model=user("double_gpt", layers=6, tieWeights=False), optimizer=SGD
    ),
    "mlp, deep": small(**COMMON, optimizer=SGD, model=user("double_builtin_mlp", depth=5)),
    "mlp, SGD": small(**COMMON, optimizer=SGD, model=user("double_builtin_mlp")),
    "resnet, SGD": small(**COMMON, **IMAGES, optimizer=SGD),
    "experts, AdamW, accumulated": small(
        **COMMON, data=TOKENS, model=user("double_moe_gpt"), optimizer=ADAMW, gradientAccumulationSteps=3
    ),
    "gpt, Muon": small(**COMMON, **GPT, optimizer=MUON),
    # Without biases: a gradient of rounding alone is made as large as others are.
    "gpt, Adafactor": small(**COMMON, data=TOKENS, model=user("double_gpt", bias=False), optimizer=ADAFACTOR),
    "gpt, AdamW, 20 steps": small(**COMMON | {"steps": 20}, **GPT, optimizer=ADAMW),
}
SHARD = "dataParallelShardDegree"
# With an average after each step, steps of SGD are those of replicas that sum their gradients, where all have as many
# samples.
LOCAL = {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 1}}}
CONTEXT = "contextParallelDegree"
RING = {"contextParallelMethod": "Ring"}
TENSOR = "tensorParallelDegree"
SEQUENCE = {TENSOR: 2, "sequenceParallel": True}
OVERLAPPED = SEQUENCE | {"asyncTensorParallel": True}
PIPELINE = "pipelineParallelDegree"
REPLICATE = "dataParallelReplicateDegree"
FULL = {"activationCheckpointing": "Full"}
SELECTIVE = {"activationCheckpointing": "Selective"}
OFFLOAD = {"offload": {"parameters": True, "activations": True}}
ACCUMULATE = {"gradientAccumulationSteps": 4}
ACCUMULATE_2 = {"gradientAccumulationSteps": 2}

# Each with changes of the training.
SCHEDULES = {
    "GPipe": {},
    "1F1B": ACCUMULATE | SELECTIVE,
    "Interleaved1F1B": FULL | {"offload": {"activations": True}},
    "LoopedBFS": {"gradientAccumulationSteps": 3},
    "InterleavedZeroBubble": FULL,
    "ZBVZeroBubble": {},
    "DualPipeV": {"gradientAccumulationSteps": 2},
}
HALVES = {"dp2": {}, "fsdp2": {SHARD: 2}, "tp2": {TENSOR: 2}, "pp2": {PIPELINE: 2}}

# ranks, training, parallelism, changes of the training
ALL_LAYOUTS = {
    "fsdp2": (2, "gpt, SGD", {SHARD: 2}, {}),
    "fsdp2, AdamW, accumulated": (2, "gpt, AdamW", {SHARD: 2}, ACCUMULATE),
    "fsdp2, recomputed": (2, "gpt, AdamW of matrices", {SHARD: 2}, FULL),
    "fsdp2, offloaded": (2, "gpt, AdamW", {SHARD: 2}, OFFLOAD),
    "dp2, offloaded": (2, "gpt, SGD", {}, OFFLOAD | ACCUMULATE),
    "dp2, static graph, recomputed": (2, "gpt, AdamW of matrices", {"dataParallel": {"staticGraph": True}}, FULL),
    "fsdp2, compiled": (2, "mlp, SGD", {SHARD: 2}, {"compile": True}),
    **{
        f"{name}, compiled": (2, training, parallelism, {"compile": True} | changes)
        for name, training, parallelism, changes in (
            ("dp2, recomputed", "gpt, SGD", {}, FULL),
            ("tp2", "gpt, SGD", {TENSOR: 2}, {}),
            ("tp2, sequence", "gpt, SGD", SEQUENCE, {}),
            ("tp2, overlapped", "gpt, AdamW of matrices", OVERLAPPED, ACCUMULATE_2),
            ("pp2", "mlp, SGD", {PIPELINE: 2}, {}),
            ("cp2", "gpt, SGD", {CONTEXT: 2}, SELECTIVE),
            ("cp2, ring", "gpt, SGD", {CONTEXT: 2, **RING}, {}),
        )
    },
    "fsdp2 x tp2, overlapped, compiled": (
        4,
        "gpt, untied, smoothed",
        {SHARD: 2, "vocabularyParallel": True, **OVERLAPPED},
        {"compile": True} | FULL,
    ),
    "pp2 x tp2, overlapped, compiled": (4, "gpt, SGD", {PIPELINE: 2, **OVERLAPPED}, {"compile": True}),
    "pp2 x cp2, ring, compiled": (4, "gpt, SGD", {PIPELINE: 2, CONTEXT: 2, **RING}, {"compile": True} | FULL),
    "tp2": (2, "gpt, SGD", {TENSOR: 2}, {}),
    "tp2, AdamW, accumulated": (2, "gpt, AdamW", {TENSOR: 2}, ACCUMULATE_2 | FULL),
    "tp2, sequence": (2, "gpt, AdamW of matrices", {TENSOR: 2, "sequenceParallel": True}, {}),
    "tp2, vocabulary": (2, "gpt, untied, smoothed", {TENSOR: 2, "vocabularyParallel": True}, {}),
    "one process, two devices": (1, "mlp, SGD", {"devicesPerProcess": 2}, ACCUMULATE),
    "one process, five devices": (1, "gpt, SGD", {"devicesPerProcess": 5}, {"microBatchSize": 3}),
    "one process, placed layers": (1, "mlp, SGD", {"devicesPerProcess": 3, "deviceMode": "Place"}, {}),
    "dp2, two devices each": (2, "mlp, SGD", {"devicesPerProcess": 2}, ACCUMULATE),
    "dp2, placed layers": (2, "mlp, SGD", {"devicesPerProcess": 2, "deviceMode": "Place"}, {}),
    "dp2 x fsdp2": (4, "gpt, SGD", {REPLICATE: 2, SHARD: 2}, {"gradientAccumulationSteps": 2}),
    "fsdp2 x tp2, everything": (
        4,
        "gpt, untied, smoothed",
        {SHARD: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
        ACCUMULATE_2 | FULL | OFFLOAD,
    ),
    **{
        f"pp2, {schedule}": (2, "gpt, AdamW", {PIPELINE: 2, "pipeline": {"schedule": schedule}}, changes)
        for schedule, changes in SCHEDULES.items()
    },
    "pp2, matrices": (2, "gpt, AdamW of matrices", {PIPELINE: 2}, {}),
    "pp2, three stages per rank": (
        2,
        "deep gpt, AdamW",
        {PIPELINE: 2, "pipeline": {"schedule": "Interleaved1F1B", "stagesPerRank": 3}},
        {},
    ),
    **{f"{name}, FP32, 20 steps": (2, "gpt, FP32, 20 steps", parallelism, {}) for name, parallelism in HALVES.items()},
    **{
        f"{name}, AdamW, 20 steps, 4 passes": (
            2,
            "gpt, AdamW, 20 steps",
            HALVES[name],
            {"gradientAccumulationSteps": 4},
        )
        for name in ("dp2", "fsdp2")
    },
    **{
        f"{name}, Muon": (2, "gpt, Muon", parallelism, ACCUMULATE_2 if name == "fsdp2" else {})
        for name, parallelism in HALVES.items()
    },
    **{f"{name}, Adafactor": (2, "gpt, Adafactor", HALVES[name], {}) for name in ("dp2", "pp2")},
    "one process, two devices, Adafactor": (1, "gpt, Adafactor", {"devicesPerProcess": 2}, {}),
    "one process, placed layers, Muon": (1, "gpt, Muon", {"devicesPerProcess": 3, "deviceMode": "Place"}, {}),
    "dp2 x fsdp2, Muon": (4, "gpt, Muon", {REPLICATE: 2, SHARD: 2}, {}),
    "fsdp2 x tp2, Muon": (4, "gpt, Muon", {SHARD: 2, TENSOR: 2, "vocabularyParallel": True}, {}),
    "pp2 x fsdp2, Muon": (4, "gpt, Muon", {PIPELINE: 2, SHARD: 2}, {}),
    **{
        f"{name}, resnet": (2, "resnet, SGD", parallelism, changes)
        for name, parallelism, changes in (
            ("dp2", {}, ACCUMULATE),
            ("fsdp2", {SHARD: 2}, {}),
            ("pp2", {PIPELINE: 2}, ACCUMULATE_2),
        )
    },
    "pp2, split by time": (2, "gpt, SGD", {PIPELINE: 2, "pipeline": {"split": "Time", "microbatches": 4}}, {}),
    "pp2 of an mlp, GPipe with one microbatch": (
        2,
        "mlp, SGD",
        {PIPELINE: 2, "pipeline": {"schedule": "GPipe", "microbatches": 1, "layersPerStage": [3, 5]}},
        {},
    ),
    "pp2 x dp2, ZBVZeroBubble": (
        4,
        "mlp, deep",
        {
            PIPELINE: 2,
            REPLICATE: 2,
            "pipeline": {"schedule": "ZBVZeroBubble", "split": "Parameters", "microbatches": 3},
        },
        {},
    ),
    "pp2 x fsdp2": (4, "gpt, AdamW", {PIPELINE: 2, SHARD: 2}, ACCUMULATE_2 | FULL | OFFLOAD),
    "pp2 x fsdp2, Interleaved1F1B": (
        4,
        "gpt, untied, smoothed",
        {PIPELINE: 2, SHARD: 2, "pipeline": {"schedule": "Interleaved1F1B"}},
        {},
    ),
    "pp2 x fsdp2, InterleavedZeroBubble": (
        4,
        "gpt, AdamW",
        {PIPELINE: 2, SHARD: 2, "pipeline": {"schedule": "InterleavedZeroBubble"}},
        {"gradientAccumulationSteps": 3} | FULL | OFFLOAD,
    ),
    "pp2 x fsdp2, four stages per rank": (
        4,
        "deep gpt, untied",
        {
            PIPELINE: 2,
            SHARD: 2,
            "pipeline": {"schedule": "InterleavedZeroBubble", "stagesPerRank": 4, "microbatches": 4},
        },
        {},
    ),
    "pp2 x fsdp2, ZBVZeroBubble": (
        4,
        "gpt, untied, smoothed",
        {PIPELINE: 2, SHARD: 2, "pipeline": {"schedule": "ZBVZeroBubble"}},
        {"gradientAccumulationSteps": 3},
    ),
    "pp2 x tp2": (4, "gpt, SGD", {PIPELINE: 2, TENSOR: 2}, ACCUMULATE_2),
    "pp2 x tp2, everything": (
        4,
        "gpt, AdamW",
        {
            PIPELINE: 2,
            TENSOR: 2,
            "sequenceParallel": True,
            "vocabularyParallel": True,
            "pipeline": {"schedule": "InterleavedZeroBubble"},
        },
        FULL,
    ),
    "pp4": (4, "gpt, SGD", {PIPELINE: 4, "pipeline": {"microbatches": 6}}, {}),
    "pp4, DualPipeV": (
        4,
        "deep gpt, AdamW",
        {PIPELINE: 4, "pipeline": {"schedule": "DualPipeV", "microbatches": 8}},
        {},
    ),
    "pp2 x fsdp2 x tp2": (
        8,
        "gpt, untied, smoothed",
        {PIPELINE: 2, SHARD: 2, TENSOR: 2, "sequenceParallel": True},
        ACCUMULATE_2,
    ),
    "dp2 x fsdp2 x tp2": (8, "gpt, SGD", {REPLICATE: 2, SHARD: 2, TENSOR: 2}, ACCUMULATE_2),
    "tp4": (4, "gpt, SGD", {TENSOR: 4, "vocabularyParallel": True}, {}),
    "cp2": (2, "gpt, SGD", {CONTEXT: 2}, {}),
    "cp2, AdamW, accumulated": (2, "gpt, AdamW", {CONTEXT: 2}, ACCUMULATE | FULL),
    "cp2, offloaded": (2, "gpt, AdamW of matrices", {CONTEXT: 2}, SELECTIVE | OFFLOAD),
    "cp2, static graph": (4, "gpt, SGD", {CONTEXT: 2, "dataParallel": {"staticGraph": True}}, ACCUMULATE_2 | SELECTIVE),
    "cp2, Muon": (4, "gpt, Muon", {CONTEXT: 2, SHARD: 2}, {}),
    "cp2 x dp2": (4, "gpt, untied, smoothed", {CONTEXT: 2}, ACCUMULATE_2),
    "cp2 x fsdp2": (4, "gpt, AdamW", {CONTEXT: 2, SHARD: 2}, ACCUMULATE_2 | FULL),
    "cp4": (4, "gpt, AdamW", {CONTEXT: 4}, {}),
    "cp2 x dp2 x fsdp2": (8, "gpt, untied, smoothed", {CONTEXT: 2, SHARD: 2, REPLICATE: 2}, ACCUMULATE_2),
    "cp2 x tp2": (4, "gpt, SGD", {CONTEXT: 2, TENSOR: 2}, ACCUMULATE_2),
    "cp2 x tp2, everything": (
        4,
        "gpt, untied, smoothed",
        {CONTEXT: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
        FULL | OFFLOAD,
    ),
    "cp2 x fsdp2 x tp2": (8, "gpt, AdamW", {CONTEXT: 2, SHARD: 2, TENSOR: 2, "sequenceParallel": True}, ACCUMULATE_2),
    "cp2, ring": (2, "gpt of one head, SGD", {CONTEXT: 2, **RING}, {}),
    "cp2, ring, everything": (2, "gpt, AdamW", {CONTEXT: 2, **RING}, ACCUMULATE | SELECTIVE | OFFLOAD),
    "cp4, ring": (4, "gpt of one head, SGD", {CONTEXT: 4, **RING}, FULL),
    "cp2 x dp2, ring": (4, "gpt, untied, smoothed", {CONTEXT: 2, **RING}, ACCUMULATE_2),
    "cp2 x fsdp2, ring": (4, "gpt, AdamW", {CONTEXT: 2, SHARD: 2, **RING}, ACCUMULATE_2 | FULL),
    "cp2 x tp2, everything, ring": (
        4,
        "gpt, untied, smoothed",
        {CONTEXT: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True, **RING},
        FULL | OFFLOAD,
    ),
    "pp2 x cp2": (4, "gpt, AdamW", {PIPELINE: 2, CONTEXT: 2}, ACCUMULATE_2 | SELECTIVE),
    **{
        f"pp2 x cp2, ring, {schedule}": (
            4,
            "gpt, untied, smoothed" if schedule in ("ZBVZeroBubble", "DualPipeV") else "gpt, AdamW",
            {PIPELINE: 2, CONTEXT: 2, **RING, "pipeline": {"schedule": schedule}},
            changes if schedule != "1F1B" else changes | {"activationCheckpointing": "Full"},
        )
        for schedule, changes in SCHEDULES.items()
    },
    "pp2 x cp2 x fsdp2, ring": (8, "gpt, AdamW", {PIPELINE: 2, CONTEXT: 2, SHARD: 2, **RING}, ACCUMULATE_2 | FULL),
    "pp2 x cp2 x tp2": (
        8,
        "gpt, untied, smoothed",
        {PIPELINE: 2, CONTEXT: 2, TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
        ACCUMULATE_2,
    ),
    "cp4 x fsdp2, ring": (8, "gpt, AdamW", {CONTEXT: 4, SHARD: 2, **RING}, ACCUMULATE_2),
    # All others of experts are test_moe.py's, which the gate leaves out.
    "fsdp2 + ep2": (2, "experts, AdamW, accumulated", {SHARD: 2, "expertParallelDegree": 2}, FULL),
    "cp2 + ep2": (2, "experts, AdamW, accumulated", {CONTEXT: 2, "expertParallelDegree": 2}, {}),
}
# Every part of these is in another layout, too; tests/gpu has them.
_LONG = {
    "fsdp2, AdamW, accumulated",
    "fsdp2, recomputed",
    "one process, two devices",
    "tp2",
    "tp2, sequence",
    "fsdp2, FP32, 20 steps",
    "tp2, FP32, 20 steps",
    "dp2, AdamW, 20 steps, 4 passes",
    "dp2, resnet",
}
_IN_GATE = {
    "cp2 x dp2",
    "cp2 x fsdp2",
    "cp2 x tp2, everything",
    "cp4, ring",
    "pp2 x cp2, ring, Interleaved1F1B",
    "dp2 x fsdp2",
    "fsdp2 x tp2, everything",
    "pp2 x fsdp2, Interleaved1F1B",
    "pp2 x tp2",
}


def _wanted(name: str) -> bool:
    """Whether this run has the layout: the gate has two ranks of each kind, and of four those that combine the most."""
    ranks, _, _, changes = ALL_LAYOUTS[name]
    if GATE and name not in _IN_GATE and (ranks > 2 or "compile" in changes):
        return False
    return SOAK or name not in _LONG


LAYOUTS = {name: layout for name, layout in ALL_LAYOUTS.items() if _wanted(name)}


def layout_fixtures(module, layouts, trainings):
    """Return two fixtures of a module of tests, `alone` and `together`: results of each training in one process, and of
    each layout, as far as a test of this run has them as its `layout`.

    layouts: ranks, training, parallelism and changes of the training, by name.
    """

    def wanted(asked_for):
        return {name: layouts[name] for name in layouts if name in asked_for(module, "layout")}

    @pytest.fixture(scope="module")
    def alone(tmp_path_factory, asked_for):
        used = {training for _, training, *_ in wanted(asked_for).values()}
        return run_cases(tmp_path_factory.mktemp("alone"), 1, {name: [{"training": trainings[name]}] for name in used})

    @pytest.fixture(scope="module")
    def together(tmp_path_factory, asked_for):
        return run_layouts(tmp_path_factory, trainings, wanted(asked_for))

    return alone, together
