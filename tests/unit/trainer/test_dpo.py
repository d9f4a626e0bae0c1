"""The example of direct preference optimisation: its loss is equation 7 of the paper, and it raises the margin."""

import json
import math

import pytest
import torch

from disttrain.main import main
from disttrain_api.training import Training
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.build import build_task
from examples.tasks.contrastive import Contrastive
from tests.builders import a_manifest
from tests.chats import CHATML, VOCABULARY, words, write_chats, write_tokenizer
from tests.unit.trainer.comparisons import require_same, require_same_bits, series
from tests.unit.trainer.layouts import SHARD, TENSOR
from tests.unit.trainer.transformers_code import described, moved
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

# With a head of the usual size that stays as it is, all tokens are about as likely whatever comes before them.
MODEL = described("llama") | {"vocab_size": VOCABULARY, "initializer_range": 0.3}
del MODEL["rope_parameters"]
LORA = {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "v_proj", "down_proj"]}
PAIRS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pairs")
    rows = [
        {"prompt": words(at, 2 + at % 3), "chosen": words(at + 1, 1 + at % 4), "rejected": words(at + 2, 2 + at % 5)}
        for at in range(PAIRS)
    ]
    write_chats(path / "pairs.jsonl", rows)
    write_tokenizer(path / "tokenizer", CHATML)
    return path


def config(folder, **changes):
    files = {"pairs": str(folder / "pairs.jsonl"), "tokenizer": str(folder / "tokenizer")}
    return files | {"config": MODEL, "held_out": 8, "beta": 0.5, **changes}


def dpo(folder, **changes):
    from examples.tasks.dpo import Dpo

    return Dpo(**config(folder, **changes))


def log_probability(model, answer):
    """Return the log-probability of the tokens that count, taken one at a time."""
    tokens, targets = answer
    scores = torch.log_softmax(model(tokens.unsqueeze(0))[0], dim=-1)
    return sum(scores[at, token] for at, token in enumerate(targets.tolist()) if token != IGNORED)


def test_a_text_may_hold_what_ends_a_line_elsewhere(folder, tmp_path):
    """JSON allows these as they are in a text; a line of JSON Lines ends with \\n alone."""
    rows = [{"prompt": f"a{mark}b", "chosen": words(1, 2), "rejected": words(2, 3)} for mark in "\u2028\u2029\x85"]
    escaped = dpo(folder, pairs=str(write_chats(tmp_path / "escaped.jsonl", rows)), held_out=0).pairs
    lines = "\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (tmp_path / "raw.jsonl").write_bytes(f"{lines}\r\n\r\n".encode())
    raw = dpo(folder, pairs=str(tmp_path / "raw.jsonl"), held_out=0).pairs
    assert len(raw) == len(rows)
    for one, other in zip(raw, escaped, strict=True):
        assert [answer[0].tolist() for answer in one] == [answer[0].tolist() for answer in other]


@pytest.mark.parametrize("changes", [{}, LORA], ids=["a copy", "adapters"])
def test_the_loss_is_that_of_the_paper(folder, changes):
    task = dpo(folder, **changes)
    torch.manual_seed(3)
    model = task.model().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    reference = dpo(folder, **changes).model().double()
    reference.load_state_dict(before)
    if task.reference is not None:
        task.reference.double()
    pairs = task.data()[0][:5]
    assert len({len(answer[0]) for pair in pairs for answer in pair}) > 3
    batch = task.collate(pairs)
    assert task.loss(model, batch).sum.item() == pytest.approx(5 * math.log(2), rel=1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    found = task.loss(model, batch)
    rewards = [
        [0.5 * (log_probability(model, answer) - log_probability(reference, answer)) for answer in pair]
        for pair in pairs
    ]
    expected = sum(-torch.log(1 / (1 + torch.exp(-(chosen - rejected)))) for chosen, rejected in rewards)
    assert found.sum.item() == pytest.approx(expected.item(), rel=1e-10)
    assert found.figures["margin"].sum.item() == pytest.approx(sum(a - b for a, b in rewards).item(), rel=1e-10)
    assert found.figures["accuracy"].sum.item() == sum(a > b for a, b in rewards)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for one, other in zip(*(torch.autograd.grad(loss, trained) for loss in (found.sum, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_it_begins_with_the_weights_of_a_folder(folder, tmp_path):
    torch.manual_seed(5)
    saved = moved(dpo(folder).model()).float()
    other = transformers.AutoModelForCausalLM.from_config(saved.config)
    other.load_state_dict(saved.state_dict())
    other.save_pretrained(tmp_path / "model")
    given = {"path": str(tmp_path / "model"), "config": None}
    for changes in ({}, LORA):
        task = dpo(folder, **given, **changes)
        begun = {name: value for name, value in task.model().state_dict().items() if ".lora_" not in name}
        require_same_bits(begun, saved.state_dict())
        if task.reference is not None:
            require_same_bits(task.reference.state_dict(), begun)


@pytest.fixture(scope="module")
def storage(tmp_path_factory):
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def results(folder, storage, tmp_path_factory):
    def training(**changes):
        task = {"entrypoint": "examples.tasks.dpo:Dpo", "config": config(folder, **changes)}
        rates = {"optimizer": {"name": "AdamW", "learningRate": 0.005}, "steps": 12, "globalBatchSize": 16}
        found = small(task=task, logging={"interval": 1}, evaluation={"interval": 12}, **rates)
        del found["model"], found["data"]
        return found

    copied, adapted = training(), training(**LORA)
    cut = {"parallelism": {TENSOR: 2}}
    cases = {
        "tp2": [{"training": copied} | cut],
        "tp2, lora": [{"training": adapted} | cut],
        "dp2": [{"training": copied}],
        "fsdp2": [{"training": copied, "parallelism": {SHARD: 2}}],
        "dp2, lora": [{"training": adapted}],
        "fsdp2, lora": [{"training": adapted, "parallelism": {SHARD: 2}}],
        "resumed": [{"training": copied, "stop_after": 5}, {"training": copied}],
    }
    alone = {"copied": [{"training": copied}], "adapted": [{"training": adapted}]}
    return run_cases(storage, 2, cases) | run_cases(tmp_path_factory.mktemp("one"), 1, alone)


@pytest.mark.parametrize(
    ("layout", "alone"),
    [
        (f"{layout}{kind}", alone)
        for layout in ("dp2", "fsdp2", "tp2")
        for kind, alone in {"": "copied", ", lora": "adapted"}.items()
    ],
)
def test_the_margin_rises_in_every_layout(results, layout, alone):
    found = results[layout]
    assert found["errors"] == [None]
    margins, accuracies = series(found, "task/margin"), series(found, "task/accuracy")
    assert margins[0] == pytest.approx(0, abs=1e-5)
    assert margins[-1] > 0.5
    assert accuracies[-1] >= 0.9
    assert margins == pytest.approx(series(results[alone], "task/margin"), rel=1e-2, abs=1e-4)
    # The first step moves no A of an adapter: B is zero.
    own, expected = (
        {name: value for name, value in one["gradients"].items() if ".lora_A." not in name}
        for one in (found, results[alone])
    )
    require_same(own, expected, 1e-4)


def test_a_resumed_job_has_the_same_reference(results):
    assert results["resumed"]["errors"][1] is None
    require_same_bits(results["resumed"]["parameters"], results["dp2"]["parameters"])


def manifest_of(path, entrypoint, arguments):
    manifest = a_manifest(training={"task": {"entrypoint": entrypoint, "config": arguments}})
    training = manifest["spec"]["training"]
    manifest["spec"]["training"] = {name: value for name, value in training.items() if name not in ("model", "data")}
    path.write_text(json.dumps(manifest))
    return path


@pytest.mark.parametrize(("layout", "changes"), [("tp2", {}), ("fsdp2, lora", LORA)])
def test_the_manifest_of_the_job_exports_what_it_has_trained(folder, storage, results, tmp_path, layout, changes):
    manifest = manifest_of(tmp_path / "dpo.yaml", "examples.tasks.dpo:Dpo", config(folder, **changes))
    command = ["export", str(storage / layout / "test"), str(tmp_path / "model"), "--model", str(manifest)]
    assert main(command) == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").state_dict()
    trained = results[layout]["parameters"]
    for name, value in found.items():
        owner = name.removesuffix(".weight")
        if f"{owner}.lora_A.weight" in trained:
            added = (
                trained[f"{owner}.lora_B.weight"] @ trained[f"{owner}.lora_A.weight"] * (LORA["alpha"] / LORA["rank"])
            )
            torch.testing.assert_close(value, trained[name] + added, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(value, trained[name]), name
    if changes:
        assert main([*command[:2], str(tmp_path / "adapter"), *command[3:], "--adapter"]) == 0
        assert {path.name for path in (tmp_path / "adapter").iterdir()} >= {
            "adapter_config.json",
            "adapter_model.safetensors",
        }


@pytest.mark.parametrize(
    ("entrypoint", "sentence"),
    [
        ("examples.tasks.contrastive:Contrastive", "has no method transformers_config()"),
        ("tests.unit.trainer.test_dpo:SaysNothing", "expected a disttrain_api.transformers_config.TransformersConfig"),
    ],
)
@pytest.mark.usefixtures("results")
def test_a_task_that_does_not_say_of_what_its_model_is_built_is_named(storage, tmp_path, capfd, entrypoint, sentence):
    manifest = manifest_of(tmp_path / "job.yaml", entrypoint, {})
    assert main(["export", str(storage / "tp2" / "test"), str(tmp_path / "model"), "--model", str(manifest)]) != 0
    assert sentence in capfd.readouterr().err


class SaysNothing(Contrastive):
    def transformers_config(self):
        return {"model_type": "llama"}


def test_weights_that_the_reference_would_not_have_are_refused(folder):
    task = {"entrypoint": "examples.tasks.dpo:Dpo", "config": config(folder)}
    given = {"task": task, "checkpoint": {"initialFrom": "/models/sft"}, "steps": 1, "microBatchSize": 1}
    with pytest.raises(InvalidConfiguration, match=r"initialFrom.*Dpo has made more.*name them by `path` in"):
        build_task(Training.model_validate(given))
