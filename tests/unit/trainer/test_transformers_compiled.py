"""`training.compile` of transformers models: parameters, gradients and losses of one process that compiles nothing."""

import pytest

from tests.unit.trainer.comparisons import require_same_training
from tests.unit.trainer.layouts import ACCUMULATE_2, FULL, PIPELINE, SELECTIVE, SHARD, TENSOR, layout_fixtures
from tests.unit.trainer.test_transformers_layouts import ALL_PROJECTIONS, EVERYTHING, SEQUENCE, TIED, training
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

# The library normalises in FP32 whatever the format, and compiled code rounds it otherwise.
SINGLE = 1e-6
COMPILED = {"compile": True}
# One layer: compiling takes longer than all steps together.
SMALL = {"num_hidden_layers": 1}
TRAININGS = {
    "llama": training("llama", **SMALL),
    "qwen3": training("qwen3", **SMALL),
    "mixtral": training("mixtral", **SMALL),
    "qwen3_moe": training("qwen3_moe", **SMALL),
    "llama, tied": training("llama", **SMALL, **TIED),
    "phi3": training("phi3", **SMALL),
    "granite": training("granite", **SMALL),
    "olmo2": training("olmo2", **SMALL),
    "lora": training("qwen3", lora={"rank": 2, "targets": ALL_PROJECTIONS}, **SMALL),
}
# ranks, training, parallelism, changes of the training
LAYOUTS = {
    "one process": (1, "llama", {}, COMPILED),
    "one process, recomputed": (1, "qwen3", {}, COMPILED | SELECTIVE),
    "one process, experts": (1, "mixtral", {}, COMPILED),
    "one process, chunks": (1, "llama", {}, COMPILED | {"loss": {"chunks": 3}}),
    "dp2": (2, "qwen3", {}, COMPILED | ACCUMULATE_2),
    "fsdp2": (2, "llama", {SHARD: 2}, COMPILED | FULL),
    "fsdp2, experts": (2, "qwen3_moe", {SHARD: 2}, COMPILED),
    "pp2": (2, "llama", {PIPELINE: 2}, COMPILED),
    "tp2": (2, "llama", {TENSOR: 2}, COMPILED),
    "tp2, sequence": (2, "qwen3", SEQUENCE, COMPILED | ACCUMULATE_2),
    "tp2, everything": (2, "llama", EVERYTHING, COMPILED | FULL),
    "tp2, tied": (2, "llama, tied", EVERYTHING, COMPILED | SELECTIVE),
    "tp2, experts": (2, "mixtral", {TENSOR: 2}, COMPILED),
    "tp2, chunks": (2, "llama", {TENSOR: 2}, COMPILED | {"loss": {"chunks": 3}}),
    "tp2, phi3": (2, "phi3", SEQUENCE, COMPILED),
    "tp2, granite": (2, "granite", {TENSOR: 2}, COMPILED),
    "tp2, olmo2": (2, "olmo2", SEQUENCE, COMPILED),
    "tp2, lora": (2, "lora", EVERYTHING, COMPILED),
}


alone, together = layout_fixtures("test_transformers_compiled", LAYOUTS, TRAININGS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_layout_equals_one_process(alone, together, layout):
    name = LAYOUTS[layout][1]
    require_same_training(together[layout], alone[name], tolerance=SINGLE, adapters_alone=name == "lora")
