"""`training.loss.chunks` in every layout: what one process computes of whole logits."""

import pytest

from tests.unit.trainer.comparisons import (
    ACCURACY,
    HELD_OUT_LOSS,
    LOSS,
    require_same,
    require_same_figures,
    require_same_gradients,
)
from tests.unit.trainer.layouts import (
    ACCUMULATE,
    ACCUMULATE_2,
    CONTEXT,
    FULL,
    OFFLOAD,
    PIPELINE,
    SCHEDULES,
    SHARD,
    TENSOR,
    layout_fixtures,
)
from tests.unit.trainer.layouts import TRAININGS as OF_LAYOUTS
from tests.unit.trainer.test_transformers_layouts import TRAININGS as MODELS
from tests.unit.trainer.test_transformers_layouts import training
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

TRAININGS = OF_LAYOUTS | MODELS | {"mixtral": training("mixtral")}
# Microbatches have 24 to 192 tokens.
CHUNKS = {"loss": {"chunks": 5}}
SMOOTHED = {"loss": {"labelSmoothing": 0.1, "chunks": 5}}
VOCABULARY = {TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True}
# ranks, training, parallelism, changes of the training
LAYOUTS = {
    "one process": (1, "gpt, AdamW", {}, CHUNKS | ACCUMULATE),
    "one process, experts": (1, "mixtral", {}, CHUNKS),
    "one process, placed layers": (1, "gpt, SGD", {"devicesPerProcess": 2, "deviceMode": "Place"}, CHUNKS),
    "dp2": (2, "gpt, AdamW", {}, CHUNKS | ACCUMULATE),
    "dp2, static graph": (2, "gpt, SGD", {"dataParallel": {"staticGraph": True}}, CHUNKS | FULL),
    "dp2, granite": (2, "granite", {}, CHUNKS),
    "fsdp2": (2, "gpt, AdamW", {SHARD: 2}, CHUNKS | ACCUMULATE | FULL),
    "fsdp2, offloaded": (2, "gpt, untied, smoothed", {SHARD: 2}, SMOOTHED | OFFLOAD),
    "fsdp2, llama": (2, "llama", {SHARD: 2}, CHUNKS),
    "fsdp2, llama, tied": (2, "llama, tied", {SHARD: 2}, CHUNKS | ACCUMULATE_2),
    "tp2": (2, "gpt, SGD", {TENSOR: 2}, CHUNKS),
    "tp2, everything": (2, "gpt, untied, smoothed", VOCABULARY, SMOOTHED | FULL),
    "tp2, llama": (2, "llama, tied", {TENSOR: 2}, CHUNKS | ACCUMULATE_2),
    "tp2, everything, granite": (2, "granite", VOCABULARY, CHUNKS),
    "tp2, everything, lora": (2, "lora", VOCABULARY, CHUNKS),
    "pp2, granite by layers": (2, "granite", {PIPELINE: 2, "pipeline": {"layersPerStage": [3, 4]}}, CHUNKS),
    "cp2": (2, "gpt, untied, smoothed", {CONTEXT: 2}, SMOOTHED),
    **{
        f"pp2, {schedule}": (
            2,
            "gpt, AdamW",
            {PIPELINE: 2, "pipeline": {"schedule": schedule}},
            CHUNKS | {name: value for name, value in changes.items() if name != "loss"},
        )
        for schedule, changes in SCHEDULES.items()
    },
    "pp2 x fsdp2, zero bubble": (
        4,
        "gpt, untied, smoothed",
        {PIPELINE: 2, SHARD: 2, "pipeline": {"schedule": "ZBVZeroBubble"}},
        SMOOTHED | {"gradientAccumulationSteps": 3},
    ),
    "pp2 x tp2": (4, "gpt, untied, smoothed", {PIPELINE: 2, **VOCABULARY}, SMOOTHED | FULL),
    "fsdp2 x tp2": (4, "llama", {SHARD: 2, **VOCABULARY}, CHUNKS | ACCUMULATE_2 | OFFLOAD),
    "cp2 x fsdp2": (4, "gpt, AdamW", {CONTEXT: 2, SHARD: 2}, CHUNKS),
}
FLUSHLESS = {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream2BW"}}
LOCAL = {"dataParallel": {"mode": "LocalSGD", "localSGD": {"period": 2}}}
# What no single process computes: training and parallelism.
ALIKE = {
    "PipeDream-2BW": ("gpt, untied, smoothed", FLUSHLESS),
    "PipeDream": ("gpt, untied, smoothed", FLUSHLESS | {"pipeline": {"schedule": "PipeDream"}}),
    "LocalSGD": ("gpt, SGD", LOCAL),
}


alone, together = layout_fixtures("test_chunked_loss_layouts", LAYOUTS, TRAININGS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process_with_whole_logits(alone, together, layout):
    found, expected = together[layout], alone[LAYOUTS[layout][1]]
    assert found["errors"] == expected["errors"] == [None]
    require_same_gradients(found["gradients"], expected["gradients"])
    require_same(found["parameters"], expected["parameters"])
    require_same_figures(found, expected, (LOSS, "grad_norm", HELD_OUT_LOSS, ACCURACY))


@pytest.fixture(scope="module")
def alike(tmp_path_factory):
    cases = {}
    for name, (used, parallelism) in ALIKE.items():
        whole = {key: value for key, value in TRAININGS[used].items() if key != "maxGradientNorm"}
        cut = whole | {"loss": whole.get("loss", {}) | CHUNKS["loss"]}
        for kind, one in {"whole": whole, "cut": cut}.items():
            cases[f"{name}, {kind}"] = [{"training": one, "parallelism": parallelism}]
    return run_cases(tmp_path_factory.mktemp("alike"), 2, cases)


@pytest.mark.parametrize("name", ALIKE)
def test_a_technique_trains_as_with_whole_logits(alike, name):
    found, expected = alike[f"{name}, cut"], alike[f"{name}, whole"]
    assert found["errors"] == expected["errors"] == [None]
    require_same(found["parameters"], expected["parameters"])
    require_same_figures(found, expected, (LOSS,))
