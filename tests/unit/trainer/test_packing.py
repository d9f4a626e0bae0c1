"""`packing`: conversations that share a sequence are trained as if each were a sample of its own."""

import re
from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.chat import ChatConfig
from disttrain_trainer.data import chat
from disttrain_trainer.data.chats.packing import best_fit_decreasing
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.metrics.report import THROUGHPUT
from disttrain_trainer.runtime.randomness import seed_everything
from tests.chats import CHATML, VOCABULARY, conversations, said, words, write_chats, write_tokenizer
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, require_same, require_same_bits, series
from tests.unit.trainer.context_code import of_parts
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.test_chat_training import LORA, by_hand
from tests.unit.trainer.test_document_mask import LAYOUTS as OF_DOCUMENTS
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.user_code import double_gpt
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, run_layouts, small, user

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
ROWS, HELD_OUT, LENGTH = 40, 10, 64
LAYOUTS = OF_DOCUMENTS | {"fsdp2, adapters": (2, "adapters", {SHARD: 2}, {})}
FAMILIES = {"llama": {}, "qwen3": {"family": "qwen3"}, "qwen2, windows": {"family": "qwen2, windows"}}
FAMILIES["adapters"] = {"lora": LORA}
# What is built here, and as an entry point.
GPT = {"vocabularySize": VOCABULARY, "sequenceLength": LENGTH, "bias": False}
BUILT = {"gpt": lambda: double_gpt(**GPT)} | {
    name: lambda config=config: double_transformers(**config, vocab_size=VOCABULARY)
    for name, config in FAMILIES.items()
}
MODELS = {"gpt": user("double_gpt", **GPT)} | {
    name: {
        "entrypoint": "tests.unit.trainer.transformers_code:double_transformers",
        "config": config | {"vocab_size": VOCABULARY},
    }
    for name, config in FAMILIES.items()
}


@given(st.lists(st.integers(1, 20), max_size=60))
def test_packs_hold_each_length_once_and_no_two_of_them_fit_into_one(lengths):
    packs = best_fit_decreasing(np.array(lengths, np.int64), 20)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    filled = [sum(lengths[number] for number in pack) for pack in packs]
    assert max(filled, default=0) <= 20
    assert all(one + other > 20 for one, other in combinations(filled, 2))


def test_a_length_comes_where_it_leaves_the_least_room():
    # The 2 would also fit beside the 14, which was there first and has more room.
    packs = best_fit_decreasing(np.array([2, 7, 14, 11]), 20)
    assert sorted(map(sorted, packs)) == [[0, 1, 3], [2]]


def test_neighbours_of_equal_length_are_drawn():
    packs = best_fit_decreasing(np.full(100, 5), 10)
    assert len(packs) == 50
    assert sum(abs(one - other) == 1 for one, other in packs) < 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats")
    write_chats(path / "chats.jsonl", conversations(ROWS))
    write_tokenizer(path / "chatml", CHATML)
    return path


def data_of(folder, **changes):
    files = {"path": str(folder / "chats.jsonl"), "tokenizer": str(folder / "chatml")}
    return files | {"packing": True, "heldOutFraction": HELD_OUT / ROWS, "sequenceLength": LENGTH} | changes


def loaded(folder, **changes):
    return chat.load(ChatConfig.model_validate(data_of(folder, **changes)))


def test_samples_are_whole_conversations_in_a_row(folder):
    packed, alone = loaded(folder), loaded(folder, packing=False)
    assert packed.packed
    assert packed.fingerprint == alone.fingerprint
    for samples, conversations_alone in ((packed.training, alone.training), (packed.held_out, alone.held_out)):
        assert len(samples) < len(conversations_alone)
        found = []
        for index in range(len(samples)):
            inputs, targets, starts = samples[index]
            assert inputs.dtype == targets.dtype == starts.dtype == torch.int64
            assert inputs.shape == targets.shape == starts.shape == (LENGTH,)
            cuts = [*starts.unique().tolist(), LENGTH]
            assert (starts[1:] >= starts[:-1]).all()
            assert torch.equal(starts[cuts[:-1]], torch.tensor(cuts[:-1]))
            for begin, end in pairwise(cuts):
                found.append((tuple(inputs[begin:end].tolist()), tuple(targets[begin:end].tolist())))
        # What is behind the last conversation of a sample predicts nothing.
        found = [one for one in found if set(one[1]) != {IGNORED}]
        expected = [(tuple(inputs.tolist()), tuple(targets.tolist())) for inputs, targets in conversations_alone]
        assert Counter(found) == Counter(expected)


def test_a_conversation_as_long_as_a_sequence_has_one_for_itself(tmp_path):
    rows = [said("the fox", words(1, 30)), said("a dog", "runs"), said("a dog", "jumps")]
    write_chats(tmp_path / "chats.jsonl", rows)
    write_tokenizer(tmp_path / "chatml", CHATML)
    data = loaded(tmp_path, sequenceLength=50, longConversations="Truncate", heldOutFraction=0)
    assert sorted(map(len, data.training.packs)) == [1, 2]
    # Its last token predicts nothing, and is left out.
    (alone,) = [sample for sample in data.training if (sample.starts > 0).sum() == 1]
    assert alone.starts.tolist() == [0] * 49 + [49]
    assert alone.targets[48] != IGNORED
    assert alone.targets[49] == IGNORED
    assert data.held_out is None


def test_the_log_says_how_much_is_padding(folder):
    data, alone = loaded(folder), loaded(folder, packing=False)
    samples, tokens = len(data.training), sum(len(inputs) for inputs, _ in alone.training)
    padding = 100 * (1 - tokens / (samples * LENGTH))
    assert data.notes[-1] == (
        f"{ROWS - HELD_OUT} conversations are packed into {samples} samples of {LENGTH} tokens, of which {padding:.1f} "
        f"% are padding; {HELD_OUT} held-out ones into {len(data.held_out)}"
    )
    assert not any("packed" in note for note in alone.notes)


def training(folder, model="llama", **changes):
    data = {"name": "chat", "config": data_of(folder) | changes.pop("data", {})}
    return small(model=MODELS[model], data=data, logging={"interval": 1}, **changes)


@pytest.fixture(scope="module")
def alone(folder):
    """For each model: the loss of the conversations one at a time, its gradients, and what is held out after a step."""
    data, found = loaded(folder, packing=False), {}
    for name, build in BUILT.items():
        seed_everything(0)
        model = build()
        loss = by_hand(model, data.training)
        loss.backward()
        named = model.named_parameters(remove_duplicate=False)
        gradients = {key: value.grad for key, value in named if value.requires_grad}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter -= 0.1 * parameter.grad
            held_out = by_hand(model, data.held_out).item()
        found[name] = loss.item(), gradients, held_out
    return found


@pytest.fixture(scope="module")
def together(tmp_path_factory, folder, asked_for):
    asked = asked_for("test_packing", "layout")
    # All samples, and padding, which counts nothing.
    trainings = {name: training(folder, name, steps=1) for name in MODELS}
    return run_layouts(tmp_path_factory, trainings, {name: LAYOUTS[name] for name in LAYOUTS if name in asked})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_conversations_one_at_a_time(alone, together, layout):
    found, (loss, gradients, held_out) = together[layout], alone[LAYOUTS[layout][1]]
    assert found["errors"] == [None]
    assert series(found) == pytest.approx([loss], rel=1e-10)
    assert series(found, HELD_OUT_LOSS) == pytest.approx([held_out], rel=1e-10)
    require_same(found["gradients"], gradients)


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    four = training(folder, globalBatchSize=4)
    ahead, unpacked = four | {"dataWorkers": 2}, training(folder, globalBatchSize=4, data={"packing": False})
    cases = {
        "uninterrupted": [{"training": four}],
        "resumed": [{"training": four, "stop_after": 4}, {"training": ahead}],
        "unpacked": [{"training": four, "stop_after": 2}, {"training": unpacked}],
        "accumulated": [{"training": four | {"microBatchSize": 1}}],
        "unaware": [{"training": four | {"model": of_parts("partless")}}],
        "an epoch": [{"training": training(folder, steps=1)}],
    }
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases) | {
        f"two ranks, {name}": result
        for name, result in run_cases(tmp_path_factory.mktemp("two"), 2, {"whole": [{"training": four}]}).items()
    }


def test_a_resumed_job_trains_to_the_same_bits(folder, results):
    whole, resumed = results["uninterrupted"], results["resumed"]
    assert whole["errors"] == [None]
    assert [error is None for error in resumed["errors"]] == [False, True]
    require_same_bits(resumed["parameters"], whole["parameters"])
    assert series(resumed) == series(whole)
    # The second epoch has begun, with the same samples in another order.
    assert 4 < len(loaded(folder).training) < 24
    assert len(set(series(whole))) == 6


@pytest.mark.parametrize("other", ["accumulated", "two ranks, whole"])
def test_steps_have_the_same_samples_in_any_number_of_parts(results, other):
    whole, found = results["uninterrupted"], results[other]
    assert found["errors"] == [None]
    assert series(found) == pytest.approx(series(whole), rel=1e-10)
    require_same(found["parameters"], whole["parameters"])


def test_a_job_that_resumes_without_packing_begins_an_epoch(results):
    stopped, resumed = results["unpacked"]["errors"]
    assert stopped.startswith("Stopped: ")
    assert resumed is None


def test_figures_count_sequences_and_the_tokens_that_count(folder, results):
    data = loaded(folder).training
    counted = sum(int((sample.targets != IGNORED).sum()) for sample in data)
    (line,) = [line for line in results["an epoch"]["metrics"] if "lr" in line]
    # Both are of the same seconds.
    assert line["throughput(tps)"] / line[THROUGHPUT] == pytest.approx(counted / len(data))


def test_a_model_that_cannot_keep_conversations_apart_is_refused(results):
    (error,) = results["unaware"]["errors"]
    assert re.match(
        r"InvalidConfiguration: `training.data.config.packing`: the model Sequential has no .*, or remove `packing`$",
        error,
    )
