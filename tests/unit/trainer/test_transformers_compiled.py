"""`training.compile` of transformers models: parameters, gradients and losses of one process that compiles nothing."""

import pytest

from tests.unit.trainer.comparisons import require_same_training
from tests.unit.trainer.layouts import ACCUMULATE_2, FULL, PIPELINE, SELECTIVE, SHARD, TENSOR, layout_fixtures
from tests.unit.trainer.test_transformers_layouts import training
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

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
}


alone, together = layout_fixtures("test_transformers_compiled", LAYOUTS, TRAININGS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_layout_equals_one_process(alone, together, layout):
    require_same_training(together[layout], alone[LAYOUTS[layout][1]], tolerance=SINGLE)


def test_with_a_tensor_group_it_is_refused(tmp_path):
    """torch's compiler fails at the cut table."""
    case = {"training": TRAININGS["llama"] | COMPILED, "parallelism": {TENSOR: 2}}
    (error,) = run_cases(tmp_path, 2, {"tp2": [case]})["tp2"]["errors"]
    assert error.startswith("InvalidConfiguration: `training.compile`: torch does not compile a layer that is a table")
