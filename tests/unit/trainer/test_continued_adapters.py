"""Training goes on from an adapter of peft as peft's own does, in every layout; one that does not fit is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from disttrain_api.chat import ChatConfig
from disttrain_api.transformers_config import LoraConfig, TransformersConfig
from disttrain_trainer.checkpoint.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from disttrain_trainer.data import chat
from disttrain_trainer.models.transformers.adapter_files import base_of_adapter
from disttrain_trainer.models.transformers.config import library_config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.chats import CHATML, VOCABULARY, conversations, write_chats, write_tokenizer
from tests.unit.trainer.comparisons import LOSS, require_same, series
from tests.unit.trainer.layouts import ADAMW, PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_chat_training import LORA, ROWS, by_hand, data_of, training
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

STEPS = 3
LAYOUTS = {
    "dp2": {},
    "fsdp2": {SHARD: 2},
    "tp2": {TENSOR: 2},
    "tp2, everything": {TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True},
    "pp2": {PIPELINE: 2, "pipeline": {"microbatches": 2}},
}
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations and a tokenizer."""
    path = tmp_path_factory.mktemp("chats")
    write_chats(path / "chats.jsonl", conversations(ROWS))
    write_tokenizer(path / "chatml", CHATML)
    return path


@pytest.fixture(scope="module")
def base(folder):
    """A model that the library has written, in float64."""
    torch.manual_seed(1)
    given = TransformersConfig(config=described("llama") | {"vocab_size": VOCABULARY, "initializer_range": 0.3})
    transformers.AutoModelForCausalLM.from_config(library_config(given)).double().save_pretrained(folder / "base")
    return folder / "base"


@pytest.fixture(scope="module")
def adapter(folder, base):
    """An adapter that peft has written, of which both matrices have values."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    described_so = {"r": LORA["rank"], "lora_alpha": LORA["alpha"], "target_modules": LORA["targets"]}
    config = peft.LoraConfig(**described_so, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(2)
    peft.get_peft_model(model, config).save_pretrained(folder / "adapter")
    # What `init_lora_weights` was then says nothing of those that were trained since.
    written = json.loads((folder / "adapter" / ADAPTER_CONFIG).read_text())
    (folder / "adapter" / ADAPTER_CONFIG).write_text(json.dumps(written | {"init_lora_weights": True}))
    return folder / "adapter"


def case_of(folder, base, adapter, parallelism, **changes):
    entrypoint = "tests.unit.trainer.transformers_code:double_folder"
    model = {"entrypoint": entrypoint, "config": {"path": str(base), "lora": LORA} | changes.pop("model", {})}
    changes = {"seed": 9, "optimizer": ADAMW, "steps": STEPS, "globalBatchSize": 16} | changes
    begin = {"checkpoint": {"initialFrom": str(adapter)}, "model": model}
    return [{"training": training(folder) | begin | changes, "parallelism": parallelism}]


@pytest.fixture(scope="module")
def results(folder, base, adapter, tmp_path_factory, asked_for):
    asked = asked_for("test_continued_adapters", "layout")
    cases = {name: case_of(folder, base, adapter, LAYOUTS[name]) for name in LAYOUTS if name in asked}
    return run_cases(tmp_path_factory.mktemp("together"), 2, cases)


@pytest.fixture(scope="module")
def continued(folder, base, adapter):
    """Losses and parameters of peft's own continuation; a step has all conversations."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model = peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True, torch_device="cpu")
    samples = chat.load(ChatConfig.model_validate(data_of(folder))).training
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=ADAMW["learningRate"], weight_decay=ADAMW["weightDecay"])
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = by_hand(lambda tokens: model(tokens).logits, samples)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, peft.get_peft_model_state_dict(model), plain.state_dict()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_goes_on_as_peft_does(results, continued, base, layout):
    found, (losses, adapters, _) = results[layout], continued
    assert found["errors"] == [None]
    assert series(found, LOSS) == pytest.approx(losses, rel=1e-10)
    parameters = found["parameters"]
    require_same({name: parameters[name.removeprefix(PREFIX)] for name in adapters}, adapters)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for name, value in model.state_dict().items():
        assert torch.equal(parameters[name], value), name


@pytest.fixture(scope="module")
def refused(folder, base, adapter, tmp_path_factory):
    """The error of each job that may not go on."""
    path = tmp_path_factory.mktemp("refused")

    def altered(name, **fields):
        shutil.copytree(adapter, path / name)
        written = json.loads((path / name / ADAPTER_CONFIG).read_text())
        (path / name / ADAPTER_CONFIG).write_text(json.dumps(written | fields))
        return path / name

    def with_tensors(name, change):
        found = altered(name)
        save_file(change(load_file(found / ADAPTER_FILE)), found / ADAPTER_FILE)
        return found

    shutil.copytree(base, path / "another base")
    (pickled := altered("pickled")).joinpath(ADAPTER_FILE).unlink()
    half = with_tensors("half", lambda tensors: {name: tensors[name] for name in tensors if "layers.1." not in name})
    head = with_tensors("head", lambda tensors: tensors | {f"{PREFIX}lm_head.weight": torch.ones(VOCABULARY, 16)})
    narrow = with_tensors("narrow", lambda tensors: {name: tensors[name][:, :2].clone() for name in tensors})
    cases = {
        name: case_of(folder, base, begin, {}, **changes)
        for name, (begin, changes) in {
            "rank": (adapter, {"model": {"lora": LORA | {"rank": 2}}}),
            "alpha": (adapter, {"model": {"lora": LORA | {"alpha": 8.0}}}),
            "targets": (adapter, {"model": {"lora": LORA | {"targets": ["q_proj"]}}}),
            "none": (adapter, {"model": {"lora": None}}),
            "another base": (adapter, {"model": {"path": str(path / "another base")}}),
            "rslora": (altered("rslora", use_rslora=True), {}),
            "pissa": (altered("pissa", init_lora_weights="pissa"), {}),
            "ranks by layer": (altered("ranks", rank_pattern={"q_proj": 2}), {}),
            "not of this time": (altered("new", some_variant={"of": "LoRA"}), {}),
            "a pattern": (altered("pattern", target_modules=".*q_proj"), {}),
            "pickled": (pickled, {}),
            "half of the layers": (half, {}),
            "a head": (head, {}),
            "another width": (narrow, {}),
            "no such model": (adapter, {"model": {}}),
        }.items()
    }
    gpt = {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8, "vocabularySize": VOCABULARY}}
    cases["no such model"][0]["training"]["model"] = gpt
    found = run_cases(path / "alone", 1, cases)
    return {name: result["errors"][0] for name, result in found.items()}


@pytest.mark.parametrize(
    ("case", "expected"),
    {
        "rank": "InvalidConfiguration: `training.model.config.lora.rank` is 2, but the adapter {} has 4: write "
        "{{rank: 4, alpha: 16, targets: [down_proj, q_proj, v_proj]}}",
        "alpha": "InvalidConfiguration: `training.model.config.lora.alpha` is 8, but the adapter {} has 16: write ",
        "targets": "lora.targets` is [q_proj], but the adapter {} has [down_proj, q_proj, v_proj]",
        "none": "`training.model.config.lora` is not given, but `training.checkpoint.initialFrom` names an adapter, {}",
        "another base": "another base, but the adapter {} was trained on ",
        "rslora": "adapter_config.json: `use_rslora` is True, expected none: ",
        "pissa": "adapter_config.json: `init_lora_weights` is pissa, expected True or False or gaussian",
        "ranks by layer": "adapter_config.json: `rank_pattern` is ",
        "not of this time": "adapter_config.json: `some_variant` is ",
        "a pattern": "adapter_config.json: `target_modules` is .*q_proj, expected a list of projections",
        "pickled": "holds adapter_config.json and no adapter_model.safetensors",
        "half of the layers": "it has no parameter `model.layers.1.",
        "a head": "parameter `lm_head.weight` is unknown here",
        "another width": "has shape [4, 2] there and [4, 16] here",
        "no such model": "names an adapter, {}, which only a model of `transformers` with ",
    }.items(),
)
def test_an_adapter_that_is_not_continued_is_named(refused, adapter, case, expected):
    assert expected.format(adapter) in (refused[case] or "none")


def test_without_a_path_the_base_is_where_the_adapter_says(adapter, base, tmp_path):
    lora = LoraConfig.model_validate(LORA)
    assert base_of_adapter(adapter, lora, None) == str(base)
    shutil.copytree(adapter, tmp_path / "of the Hub")
    written = json.loads((adapter / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": "someone/llama"}
    (tmp_path / "of the Hub" / ADAPTER_CONFIG).write_text(json.dumps(written))
    assert base_of_adapter(tmp_path / "of the Hub", lora, str(base)) == str(base)
    with pytest.raises(InvalidConfiguration, match="someone/llama, is no folder here: name the folder of that model"):
        base_of_adapter(tmp_path / "of the Hub", lora, None)
