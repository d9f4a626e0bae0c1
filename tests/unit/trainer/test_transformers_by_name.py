"""The built-in model `transformers` with weights of files, built without memory: each layout begins with them."""

from typing import Any

import pytest
import torch

from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_transformers_layouts import training
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "replicas": (2, {}),
    "shards": (2, {SHARD: 2}),
    "tensors": (2, {TENSOR: 2}),
    "stages": (2, {PIPELINE: 2, "pipeline": {"microbatches": 2}}),
}
LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_layout_begins_with_the_files_bit_by_bit(tmp_path, ranks):
    folder = tmp_path / "model"
    written = transformers.LlamaForCausalLM(transformers.LlamaConfig(**described("llama")))
    written.save_pretrained(folder)
    cases = {}
    for name, parallelism in ((name, parallelism) for name, (own, parallelism) in LAYOUTS.items() if own == ranks):
        for kind, lora in (("whole", None), ("adapted", LORA)):
            model = {"name": "transformers", "config": {"path": str(folder), "sequenceLength": 8, "lora": lora}}
            given = training("llama") | {"model": model, "checkpoint": {"initialFrom": str(folder)}, "steps": 1}
            given["optimizer"] = {"name": "SGD", "learningRate": 1e-30}
            cases[f"{name}, {kind}"] = [{"training": given, "parallelism": parallelism}]
    for name, found in run_cases(tmp_path / "cases", ranks, cases).items():
        assert found["errors"] == [None], name
        own = {key.replace(".base.", "."): value for key, value in found["parameters"].items() if ".lora_" not in key}
        for key, value in written.state_dict().items():
            assert torch.equal(own[key], value), (name, key)
