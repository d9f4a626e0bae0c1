"""Fine-tuning on conversations: the mean over all tokens that count, in every layout, and after a resume."""

import json
import math
import re

import pytest
import torch
from torch.nn import functional

from disttrain.main import main
from disttrain_api.chat import ChatConfig
from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.data import chat
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.models.transformers.config import library_config
from disttrain_trainer.runtime.randomness import seed_everything
from tests.builders import a_manifest
from tests.chats import CHATML, LLAMA, VOCABULARY, conversations, write_chats, write_tokenizer
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, LOSS, require_same, require_same_bits, series
from tests.unit.trainer.layouts import CONTEXT, PIPELINE, SHARD, TENSOR
from tests.unit.trainer.test_estimate import estimated
from tests.unit.trainer.transformers_code import described, double_transformers
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, job, run_cases, run_ranks, small

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

ROWS, HELD_OUT = 24, 8
SEQUENCE = {TENSOR: 2, "sequenceParallel": True}
# ranks, parallelism, samples of a microbatch: all 16 conversations that are not held out are one step.
LAYOUTS = {
    "one rank": (1, {}, 16),
    "one rank, accumulated": (1, {}, 3),
    "dp2": (2, {}, 8),
    "dp2, accumulated": (2, {}, 2),
    "fsdp2, accumulated": (2, {SHARD: 2}, 3),
    "tp2": (2, SEQUENCE, 16),
    "cp2": (2, {CONTEXT: 2}, 4),
    "pp2": (2, {PIPELINE: 2, "pipeline": {"microbatches": 2}}, 8),
}
LORA = {"rank": 4, "alpha": 16.0, "targets": ["q_proj", "v_proj", "down_proj"]}
# With a head of the usual size that stays as it is, all tokens are about as likely whatever comes before them.
MODEL = described("llama") | {"vocab_size": VOCABULARY, "initializer_range": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Conversations, and two tokenizers."""
    path = tmp_path_factory.mktemp("chats")
    write_chats(path / "chats.jsonl", conversations(ROWS))
    write_tokenizer(path / "chatml", CHATML)
    write_tokenizer(path / "llama", LLAMA)
    return path


def data_of(folder, tokenizer="chatml"):
    given = {"path": str(folder / "chats.jsonl"), "tokenizer": str(folder / tokenizer)}
    return given | {"heldOutFraction": HELD_OUT / ROWS, "sequenceLength": 96}


def training(folder, tokenizer="chatml", **changes):
    entrypoint = "tests.unit.trainer.transformers_code:double_transformers"
    return small(
        model={"entrypoint": entrypoint, "config": {"vocab_size": VOCABULARY}},
        data={"name": "chat", "config": data_of(folder, tokenizer)},
        logging={"interval": 1},
        **changes,
    )


def case_of(folder, parallelism, micro):
    # More than there are: padding counts nothing.
    steps = {"steps": 1, "globalBatchSize": 24 if micro == 3 else 16, "microBatchSize": micro}
    return [{"training": training(folder, **steps), "parallelism": parallelism}]


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    found = {}
    for world in (1, 2):
        cases = {
            name: case_of(folder, parallelism, micro)
            for name, (ranks, parallelism, micro) in LAYOUTS.items()
            if ranks == world
        }
        if world == 2:
            six = {"globalBatchSize": 6}
            whole, ahead = training(folder, **six), training(folder, **six, dataWorkers=2)
            cases["uninterrupted"] = [{"training": whole}]
            cases["resumed"] = [{"training": whole, "stop_after": 4}, {"training": ahead}]
            cases["another template"] = [
                {"training": whole, "stop_after": 2},
                {"training": training(folder, "llama", **six)},
            ]
        found |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, cases)
    return found


def by_hand(model, samples):
    """Minus the logarithm of the probability of each token that counts, one conversation at a time; their mean."""
    losses = []
    for inputs, targets in samples:
        scores = functional.log_softmax(model(inputs.unsqueeze(0))[0], dim=-1)
        losses += [-scores[at, token] for at, token in enumerate(targets.tolist()) if token != IGNORED]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def expected(folder):
    """Loss and gradients of the first step, and what is held out before it and after."""
    data = chat.load(ChatConfig.model_validate(data_of(folder)))
    seed_everything(0)
    model = double_transformers(vocab_size=VOCABULARY)
    loss = by_hand(model, data.training)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
        return loss.item(), gradients, by_hand(model, data.held_out).item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_is_the_mean_over_all_tokens_that_count(results, expected, layout):
    found, (loss, gradients, held_out) = results[layout], expected
    assert found["errors"] == [None]
    assert series(found) == pytest.approx([loss], rel=1e-10)
    assert series(found, HELD_OUT_LOSS) == pytest.approx([held_out], rel=1e-10)
    assert series(found, "validation_metrics/perplexity") == pytest.approx([math.exp(held_out)], rel=1e-10)
    assert found["report"].metrics["perplexity"] == pytest.approx(math.exp(held_out), rel=1e-10)
    require_same(found["gradients"], gradients)


def test_a_resumed_job_trains_to_the_same_bits(results):
    whole, resumed = results["uninterrupted"], results["resumed"]
    assert whole["errors"] == [None]
    assert [error is None for error in resumed["errors"]] == [False, True]
    require_same_bits(resumed["parameters"], whole["parameters"])
    # An epoch has three steps, the last of which is short: another order follows.
    assert series(resumed) == series(whole)
    assert len(set(series(whole))) == 6


def test_a_job_does_not_go_on_with_another_template(results):
    _, error = results["another template"]["errors"]
    assert error.startswith("CheckpointMismatch: ")
    assert "was written with other data than `training.data` names now" in error


def test_the_log_says_how_many_conversations_there_are(folder, tmp_path):
    model = {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8, "vocabularySize": VOCABULARY}}
    data = {"name": "chat", "config": data_of(folder) | {"sequenceLength": 40, "longConversations": "LeaveOut"}}
    tiny = {"model": model, "data": data, "steps": 1, "globalBatchSize": 4}
    first, second = run_ranks(tmp_path / "world", job(tiny), 2)
    assert (first.code, second.code) == (0, 0), first.err
    left_out = r"\d+ of 24 conversations have more than 40 tokens, the longest \d+: they are left out"
    assert re.search(left_out, first.out), first.out
    assert re.search(r"\d+ conversations are trained on, \d+ held out: \d+ tokens, of which \d+ count", first.out)
    assert "conversations" not in second.out
    # A table with too few rows would end a GPU's process without a word.
    model["config"]["vocabularySize"] = 200
    (rank,) = run_ranks(tmp_path / "small", job(tiny))
    assert rank.report.error.reason == "InvalidConfiguration", rank.err
    assert "its vocabulary of 200 must be greater than or equal to that of the corpus" in rank.report.error.message


def test_memory_is_estimated_for_the_longest_conversation_that_may_be(folder):
    model = {"name": "gpt", "config": {"layers": 1, "heads": 1, "width": 8, "vocabularySize": VOCABULARY}}
    tiny = {"model": model, "steps": 1, "globalBatchSize": 4}
    tokens = {"kind": "Tokens", "sequenceLength": 96, "vocabularySize": VOCABULARY}
    found, expected = (
        estimated(tiny | {"data": {"name": name, "config": config}}, 1, {})
        for name, config in (("chat", data_of(folder)), ("synthetic", tokens))
    )
    assert found.activations == expected.activations > 0


@pytest.fixture(scope="module")
def tuned(folder, tmp_path_factory):
    """Adapters of a built-in model that have learned the conversations, and where their checkpoints are."""
    path = tmp_path_factory.mktemp("tuned")
    changes = {
        "model": {"name": "transformers", "config": {"config": MODEL, "lora": LORA}},
        "optimizer": {"name": "AdamW", "learningRate": 0.02},
        "steps": 20,
        "globalBatchSize": 16,
        "evaluation": {"interval": 20},
    }
    cases = {
        name: [{"training": training(folder) | changes, "parallelism": parallelism}]
        for name, parallelism in (("dp2", {}), ("fsdp2", {SHARD: 2}))
    }
    return path, run_cases(path, 2, cases)


@pytest.mark.parametrize("layout", ["dp2", "fsdp2"])
def test_adapters_learn_and_peft_reads_them(tuned, tmp_path, layout):
    peft = pytest.importorskip("peft")
    path, found = tuned[0], tuned[1][layout]
    assert found["errors"] == [None]
    losses = series(found, LOSS)
    assert losses[-1] < 0.8 * losses[0]
    manifest = tmp_path / "job.yaml"
    model = {"name": "transformers", "config": {"config": MODEL, "lora": LORA}}
    synthetic = {"name": "synthetic", "config": {"kind": "Tokens", "vocabularySize": VOCABULARY}}
    manifest.write_text(json.dumps(a_manifest(training={"model": model, "data": synthetic})))
    checkpoint = path / layout / "test" / "step-20"
    assert main(["export", str(checkpoint), str(tmp_path / "adapter"), "--model", str(manifest), "--adapter"]) == 0
    parameters = found["parameters"]
    base = transformers.AutoModelForCausalLM.from_config(library_config(TransformersConfig(config=MODEL)))
    base.load_state_dict({name: value for name, value in parameters.items() if ".lora_" not in name})
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", torch_device="cpu").eval()
    own = double_transformers(lora=LORA, vocab_size=VOCABULARY).float()
    own.load_state_dict(parameters)
    prompt = torch.arange(12).unsqueeze(0)
    torch.testing.assert_close(adapted(prompt).logits, own.eval()(prompt), rtol=1e-4, atol=1e-4)
