"""Fine-tuning as people do it: a folder of Hugging Face's, adapters, packed conversations, masked prompts."""

import json

import pytest
import torch

from disttrain.main import main
from disttrain_api.chat import ChatConfig
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.data import chat
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.models.transformers.config import library_config
from tests.builders import a_manifest
from tests.chats import CHATML, VOCABULARY, conversations, write_chats, write_tokenizer
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, LOSS, require_same_training, series
from tests.unit.trainer.layouts import ADAMW, SHARD, TENSOR
from tests.unit.trainer.test_chat_training import LORA, by_hand
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

ROWS, HELD_OUT, STEPS = 40, 10, 6
MODEL = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "tie_word_embeddings": True}
LAYOUTS = {
    "dp2": {},
    "fsdp2": {SHARD: 2},
    "tp2": {TENSOR: 2},
    "tp2, everything": {TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, and a folder that the library itself has written, of a model and its tokenizer."""
    path = tmp_path_factory.mktemp("chats")
    write_chats(path / "chats.jsonl", conversations(ROWS))
    config = library_config(TransformersConfig(config=described("llama") | MODEL))
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(path / "model")
    write_tokenizer(path / "model", CHATML)
    return path


def data_of(folder, **changes):
    files = {"path": str(folder / "chats.jsonl"), "tokenizer": str(folder / "model")}
    return files | {"packing": True, "heldOutFraction": HELD_OUT / ROWS, "sequenceLength": 64} | changes


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("storage")


@pytest.fixture(scope="module")
def results(folder, storage, asked_for):
    arguments = MODEL | {"lora": LORA}
    training = small(
        model={"entrypoint": "tests.unit.trainer.transformers_code:double_transformers", "config": arguments},
        data={"name": "chat", "config": data_of(folder)},
        optimizer=ADAMW,
        steps=STEPS,
        globalBatchSize=4,
        evaluation={"interval": STEPS},
        logging={"interval": 1},
        checkpoint={"initialFrom": str(folder / "model")},
    )
    asked = asked_for("test_chat_adapters", "layout")
    together = {name: [{"training": training, "parallelism": LAYOUTS[name]}] for name in LAYOUTS if name in asked}
    found = run_cases(storage / "alone", 1, {"one rank": [{"training": training}]})
    return found | run_cases(storage / "together", 2, together)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process(folder, results, layout):
    found = results[layout]
    require_same_training(found, results["one rank"], adapters_alone=True)
    assert len(set(series(found, LOSS))) == STEPS
    # The model itself is the folder's, to the last bit.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto")
    for name, value in model.state_dict().items():
        assert torch.equal(found["parameters"][name], value), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_peft_and_the_merged_model_find_the_loss_that_the_run_found(folder, storage, results, tmp_path, layout):
    peft = pytest.importorskip("peft")
    described_model = {"name": "transformers", "config": {"path": str(folder / "model"), "lora": LORA}}
    manifest = tmp_path / "job.yaml"
    data = {"name": "chat", "config": data_of(folder)}
    training = {"model": described_model, "data": data, "checkpoint": {"initialFrom": str(folder / "model")}}
    manifest.write_text(json.dumps(a_manifest(training=training, storage={"claimName": "kept"})))
    export = ["export", str(storage / "together" / layout / "test"), "--model", str(manifest)]
    assert main([*export[:2], str(tmp_path / "adapter"), *export[2:], "--adapter"]) == 0
    assert main([*export[:2], str(tmp_path / "merged"), *export[2:]]) == 0
    adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype="auto").eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype="auto").eval()
    held_out = chat.load(ChatConfig.model_validate(data_of(folder, packing=False))).held_out
    assert any((targets == IGNORED).any() for _, targets in held_out)
    with torch.no_grad():
        losses = [
            by_hand(lambda tokens, model=model: model(tokens).logits, held_out).item()
            for model in (adapted, merged, plain)
        ]
    (expected,) = series(results[layout], HELD_OUT_LOSS)
    assert losses[:2] == pytest.approx([expected] * 2, rel=1e-10)
    assert losses[2] != pytest.approx(expected, rel=1e-3)
