"""Models of transformers train in every layout as in one process: parameters, gradients, losses."""

import pytest

from tests.unit.trainer.comparisons import require_same_training
from tests.unit.trainer.layouts import (
    ACCUMULATE,
    ACCUMULATE_2,
    ADAMW,
    COMMON,
    CONTEXT,
    FULL,
    PIPELINE,
    REPLICATE,
    RING,
    SCHEDULES,
    SGD,
    SHARD,
    TENSOR,
    TOKENS,
    layout_fixtures,
)
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, small

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TIED = {"tie_word_embeddings": True}
DENSE = ("qwen2, windows", "qwen3", "olmo2", "phi3", "granite", "mistral, window", "smollm3")


def training(family, optimizer=SGD, **config):
    arguments = {"family": family, **config}
    model = {"entrypoint": "tests.unit.trainer.transformers_code:double_transformers", "config": arguments}
    return small(**COMMON, model=model, data=TOKENS, optimizer=optimizer)


TRAININGS = {
    "llama": training("llama", ADAMW),
    "llama, tied": training("llama", **TIED),
    "qwen2, one head of keys, windows": training("qwen2, windows", num_key_value_heads=1),
    "phi3, three heads": training("phi3", hidden_size=24, num_attention_heads=3, num_key_value_heads=1),
    "llama, as many keys": training("llama", num_key_value_heads=4),
    # Gradients of everything that an adapter passes on; the model itself must stay as it is.
    "lora": training("qwen3", ADAMW, lora={"rank": 2, "targets": ALL_PROJECTIONS}),
    "lora, fused": training("phi3", lora={"rank": 2, "targets": ["qkv_proj", "o_proj"]}),
    **{name: training(name) for name in DENSE},
}
SEQUENCE = {TENSOR: 2, "sequenceParallel": True}
EVERYTHING = {**SEQUENCE, "vocabularyParallel": True}
# ranks, training, parallelism, changes of the training. fsdp2, tp2 and pp2 of a llama, whole and with adapters, are in
# test_transformers_weights.py.
LAYOUTS = {
    "dp2, lora": (2, "lora", {}, ACCUMULATE),
    "pp2 by layers": (2, "granite", {PIPELINE: 2, "pipeline": {"layersPerStage": [3, 4]}}, {}),
    "tp2, everything": (2, "llama, tied", EVERYTHING, FULL),
    "tp2, sequence, lora": (2, "lora", EVERYTHING, FULL),
    "cp2, one head of keys": (2, "qwen2, one head of keys, windows", {CONTEXT: 2}, {}),
    "cp2, lora": (2, "lora", {CONTEXT: 2}, FULL),
    "cp2, windows": (2, "qwen2, windows", {CONTEXT: 2}, ACCUMULATE),
    "cp2, granite": (2, "granite", {CONTEXT: 2}, {}),
    "cp2, ring, granite": (2, "granite", {CONTEXT: 2, **RING}, {}),
    **{f"tp2, sequence, {name}": (2, name, SEQUENCE, {}) for name in ("qwen3", "olmo2", "phi3")},
    **{
        f"{layout}, {name}": (2, name, parallelism, {})
        for name in ("mistral, window", "smollm3")
        for layout, parallelism in {"fsdp2": {SHARD: 2}, "tp2": EVERYTHING, "pp2": {PIPELINE: 2}}.items()
    },
    # Tied, so that the first and the last stage share a parameter, on one rank or on two.
    **{
        f"pp2, {schedule}": (2, "llama, tied", {PIPELINE: 2, "pipeline": {"schedule": schedule}}, changes)
        for schedule, changes in SCHEDULES.items()
    },
}
# Beside other degrees, and families in layouts that cut them in another way. The complete suite has them.
LAYOUTS |= {
    "fsdp2 x tp2, lora": (4, "lora", {SHARD: 2, **SEQUENCE}, {}),
    "pp2 x fsdp2, lora": (4, "lora", {PIPELINE: 2, SHARD: 2}, ACCUMULATE_2),
    "pp2 x tp2, everything": (4, "llama, tied", {PIPELINE: 2, **EVERYTHING}, FULL),
    "cp2 x fsdp2": (4, "llama", {CONTEXT: 2, SHARD: 2}, ACCUMULATE),
    "cp4": (4, "llama", {CONTEXT: 4}, {}),
    "cp4, ring": (4, "llama", {CONTEXT: 4, **RING}, ACCUMULATE),
    "cp2 x tp2, ring": (4, "lora", {CONTEXT: 2, **EVERYTHING, **RING}, FULL),
    "cp2 x tp2, heads of keys shared": (4, "llama", {CONTEXT: 2, TENSOR: 2}, {}),
    "cp2 x tp2": (4, "llama, as many keys", {CONTEXT: 2, **EVERYTHING}, FULL),
    "dp2 x fsdp2": (4, "llama", {REPLICATE: 2, SHARD: 2}, {}),
    "tp2 of phi3, three heads": (2, "phi3, three heads", {TENSOR: 2}, {}),
    "tp2 of lora, fused": (2, "lora, fused", SEQUENCE, {}),
    "fsdp2 of lora": (2, "lora", {SHARD: 2}, {}),
    **{f"fsdp2 of {name}": (2, name, {SHARD: 2}, {}) for name in ("qwen3", "olmo2", "granite")},
    **{f"tp2 of {name}": (2, name, EVERYTHING, {}) for name in ("qwen2, windows", "granite")},
    **{f"pp2 of {name}": (2, name, {PIPELINE: 2}, {}) for name in ("qwen2, windows", "olmo2")},
    **{
        f"cp2 of {name}": (2, name, {CONTEXT: 2}, {})
        for name in ("qwen3", "olmo2", "phi3", "mistral, window", "smollm3")
    },
}
EXACT = {"fsdp2 of lora": 1e-12}
"""Layouts whose sums have the order of one process's."""


alone, together = layout_fixtures("test_transformers_layouts", LAYOUTS, TRAININGS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(alone, together, layout):
    found, expected = together[layout], alone[LAYOUTS[layout][1]]
    adapters_alone = "lora" in LAYOUTS[layout][1]
    tolerance = EXACT.get(layout, 1e-10)
    require_same_training(found, expected, adapters_alone=adapters_alone, tolerance=tolerance)
