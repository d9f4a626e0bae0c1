"""Weights in and out of files: no process holds more of the model than its part, and a few tensors besides."""

import json
import math

import pytest
import torch
from safetensors import safe_open

from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.checkpoint.export import StoredModel
from disttrain_trainer.checkpoint.safetensors_index import read_files
from disttrain_trainer.checkpoint.safetensors_writer import Described, write_folder
from disttrain_trainer.models.transformers.model import build
from disttrain_trainer.transformers_export import export_model
from tests.unit.trainer.held_memory import measured
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, how_they_ended, job, run_ranks

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

CONFIG = described("llama") | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 16,
    "tie_word_embeddings": False,
}
GIVEN = TransformersConfig(config=CONFIG, sequence_length=8)
MEBI = 2**20
LARGEST = 8192 * 512 * 4
FILE = 20 * MEBI
# A mapped file, a tensor of it, and what reading takes besides.
ROOM = FILE + 2 * LARGEST + 16 * MEBI
LAYOUTS = {
    "fsdp2": {SHARD: 2},
    "tp2": {TENSOR: 2, "vocabularyParallel": True},
    "pp2": {PIPELINE: 2, "pipeline": {"microbatches": 2}},
}


def value_of(name, shape):
    """Other numbers for each tensor."""
    return torch.full(shape, (len(name) % 7 + 1) * 1e-3) + torch.arange(shape[-1]) * 1e-6


@pytest.fixture(scope="module")
def shapes():
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in build(GIVEN).state_dict().items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, shapes):
    """What Hugging Face's library would have written."""
    target = tmp_path_factory.mktemp("model") / "llama"
    tensors = [Described(name, torch.float32, shape) for name, shape in shapes.items()]
    write_folder(
        target, tensors, lambda name: value_of(name, shapes[name]), {"config.json": json.dumps(CONFIG).encode()}, FILE
    )
    return target


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_its_part_and_one_process_writes_the_whole(folder, shapes, tmp_path, layout):
    size = sum(4 * math.prod(shape) for shape in shapes.values())
    assert size / 2 > 1.5 * ROOM
    training = {
        "model": {"name": "transformers", "config": {"config": CONFIG}},
        "data": {"name": "synthetic", "config": {"kind": "Tokens", "vocabularySize": 8192, "sequenceLength": 8}},
        "optimizer": {"name": "SGD", "learningRate": 1e-30},
        "steps": 1,
        "globalBatchSize": 4,
        "checkpoint": {"initialFrom": str(folder)},
    }
    counting = {"module": "tests.unit.trainer.held_memory", "HELD_MEMORY": str(tmp_path)}
    described_job = job(training, parallelism=LAYOUTS[layout])
    ranks = run_ranks(tmp_path / "world", described_job, 2, storage=tmp_path / "storage", **counting)
    assert [rank.code for rank in ranks] == [0, 0], how_they_ended(ranks)
    for rank in range(2):
        found = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        assert found["own"] < 0.55 * size
        assert found["own"] < found["held"] < found["own"] + ROOM

    model = StoredModel(tmp_path / "storage" / "test")
    with measured() as found:
        export_model(model, GIVEN, tmp_path / "exported", most=FILE)
    assert found.held < ROOM
    written = read_files(tmp_path / "exported" / "model.safetensors.index.json")
    assert written.keys() == shapes.keys()
    for name, (file, _) in written.items():
        with safe_open(file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), value_of(name, shapes[name])), name
