"""Choices by their likelihood: what lm-evaluation-harness finds, in every layout what a plain loop finds."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

from disttrain_api.choices import ChoicesConfig
from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.choices import multiple_of_lengths, require_fit
from disttrain_trainer.data import choices
from disttrain_trainer.data.batches import Datasets, Microbatch
from disttrain_trainer.data.choices import load_choices
from disttrain_trainer.data.packed import Packed
from disttrain_trainer.data.tokenizer import Codec
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.tasks.supervised import Supervised
from tests.chats import CHATML, VOCABULARY, conversations, words, write_chats, write_tokenizer
from tests.unit.trainer.comparisons import series
from tests.unit.trainer.layouts import CONTEXT, PIPELINE, RING, SHARD, TENSOR
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.user_code import double_gpt
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, job, run_cases, small, user

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

EVERYTHING = {TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True}
# ranks, parallelism
LAYOUTS = {
    "one rank": (1, {}),
    "one process, two devices": (1, {"devicesPerProcess": 2}),
    "dp2": (2, {}),
    "fsdp2": (2, {SHARD: 2}),
    "tp2": (2, {TENSOR: 2}),
    "tp2, everything": (2, EVERYTHING),
    "cp2": (2, {CONTEXT: 2}),
    "cp2, ring": (2, {CONTEXT: 2, **RING}),
    "pp2": (2, {PIPELINE: 2}),
    "pp2, two stages per rank": (
        2,
        {PIPELINE: 2, "pipeline": {"schedule": "Interleaved1F1B", "stagesPerRank": 2, "microbatches": 2}},
    ),
    "pp2, PipeDream": (2, {PIPELINE: 2, "pipeline": {"schedule": "PipeDream"}}),
    "dp2, packed": (2, {}),
    "pp2, packed": (2, {PIPELINE: 2, "pipeline": {"microbatches": 2}}),
    "cp2, ring, packed": (2, {CONTEXT: 2, **RING}),
}
QUESTIONS = 23
LENGTH = 32


def question(number):
    answers = [words(number + 5 * at, 1 + (number + at) % 4) for at in range(2 + number % 3)]
    return {
        "context": words(number, 2 + number % 5) + (" " if number % 4 == 0 else ""),
        "choices": ["é" * (number % 3) + answer for answer in answers],
        "answer": number % len(answers),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("choices")
    write_chats(path / "words.jsonl", [question(number) for number in range(QUESTIONS)])
    write_chats(path / "few.jsonl", [question(3)])
    write_chats(path / "chats.jsonl", conversations(24))
    write_tokenizer(path / "tokenizer", CHATML)
    return path


def config_of(folder):
    tasks = {name: str(folder / f"{name}.jsonl") for name in ("words", "few")}
    return {"tasks": tasks, "tokenizer": str(folder / "tokenizer")}


# Nothing is trained: what one process begins with is compared.
STILL = {"steps": 1, "optimizer": {"name": "SGD", "learningRate": 1e-300}}
LLAMA = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
BYTES = {"vocabularySize": 256, "sequenceLength": 256}


def case_of(folder, parallelism, packed):
    """packed: with samples in which attention stays within documents, while a question is one document."""
    tokens = {"kind": "Tokens", "sequenceLength": LENGTH, "vocabularySize": VOCABULARY, "size": 40}
    data = {"name": "synthetic", "config": tokens}
    if packed:
        chats = {"path": str(folder / "chats.jsonl"), "tokenizer": str(folder / "tokenizer"), "heldOutFraction": 0.3}
        data = {"name": "chat", "config": chats | {"sequenceLength": 96, "packing": True}}
    training = small(
        model={"entrypoint": "tests.unit.trainer.transformers_code:double_transformers", "config": LLAMA},
        data=data,
        evaluation={"batchSize": 4, "choices": config_of(folder)},
        **STILL,
    )
    return [{"training": training, "parallelism": parallelism}]


def case_of_bytes(folder):
    """Without a tokenizer and a delimiter."""
    tasks = {"tasks": {"words": str(folder / "words.jsonl")}, "delimiter": ""}
    training = small(
        model=user("double_gpt", **BYTES),
        data={"name": "text", "config": {"paths": [str(folder / "words.jsonl")], "sequenceLength": 256}},
        evaluation={"batchSize": 4, "choices": tasks},
        **STILL,
    )
    return [{"training": training}]


@pytest.fixture(scope="module")
def results(folder, tmp_path_factory):
    found = {}
    for world in (1, 2):
        cases = {
            name: case_of(folder, parallelism, "packed" in name)
            for name, (ranks, parallelism) in LAYOUTS.items()
            if ranks == world
        }
        cases[f"bytes, {world} ranks"] = case_of_bytes(folder)
        found |= run_cases(tmp_path_factory.mktemp(f"world-of-{world}"), world, cases)
    return found


@torch.no_grad()
def by_hand(model, encode, lines, delimiter=" "):
    """The figures of a task: one row after another, each token's probability looked up."""
    names = ("acc", "acc_norm", "acc_bytes", "bpb")
    sums = dict.fromkeys(names, 0.0)
    for line in lines:
        found = []
        for choice in line["choices"]:
            context = encode(line["context"].rstrip())
            tokens = encode(line["context"] + delimiter + choice)
            assert tokens[: len(context)] == context
            scores = functional.log_softmax(model(torch.tensor([tokens]))[0], dim=-1)
            found.append(sum(scores[at - 1, tokens[at]].item() for at in range(len(context), len(tokens))))
        lengths = {
            "acc": [1] * len(found),
            "acc_norm": [len(choice) for choice in line["choices"]],
            "acc_bytes": [len(choice.encode()) for choice in line["choices"]],
        }
        for name, sizes in lengths.items():
            scaled = [one / size for one, size in zip(found, sizes, strict=True)]
            sums[name] += scaled.index(max(scaled)) == line["answer"]
        answer = line["answer"]
        sums["bpb"] -= found[answer] / lengths["acc_bytes"][answer] / math.log(2)
    return {name: value / len(lines) for name, value in sums.items()}


LINES = {"words": [question(number) for number in range(QUESTIONS)], "few": [question(3)]}


@pytest.fixture(scope="module")
def expected(folder):
    seed_everything(0)
    model = double_transformers(**LLAMA)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    figures = {task: by_hand(model, encode, lines) for task, lines in LINES.items()}
    return {f"{task}/{name}": value for task, found in figures.items() for name, value in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_finds_what_a_plain_loop_finds(results, expected, layout):
    found = results[layout]
    assert found["errors"] == [None]
    metrics = found["report"].metrics
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-10)
    assert series(found, "validation_metrics/words/bpb") == [metrics["words/bpb"]]
    # With so many questions a wrong order of rows would be seen.
    assert len({expected[f"words/{name}"] for name in ("acc", "acc_norm", "acc_bytes")}) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_tokenizer_bytes_are_the_tokens(results, ranks):
    found = results[f"bytes, {ranks} ranks"]
    assert found["errors"] == [None]
    seed_everything(0)
    wanted = by_hand(double_gpt(**BYTES), lambda text: list(text.encode()), LINES["words"], "")
    assert {name: found["report"].metrics[f"words/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-10)


def task_of(tmp_path, *lines, longest=100, **changes):
    path = write_chats(tmp_path / "task.jsonl", lines)
    config = ChoicesConfig.model_validate({"tasks": {"one": str(path)}, **changes})
    (task,) = load_choices(config, longest)
    return task


LINE = {"context": "ab ", "choices": ["c", "déf"], "answer": 1}


def test_white_space_at_the_end_of_a_context_is_its_choices(tmp_path):
    task = task_of(tmp_path, LINE, delimiter="")
    inputs, targets = task.sample(1)
    assert bytes(inputs.tolist()).decode() == "ab dé"
    assert targets.tolist() == [-100, *" déf".encode()]


@pytest.mark.parametrize(
    ("scores", "right"),
    [
        # per character -3 and -1; per byte -3 and -0.75
        ([-3.0, -3.0], {"acc": 0, "acc_norm": 1, "acc_bytes": 1}),
        # the same per character: the first one counts
        ([-1.0, -3.0], {"acc": 0, "acc_norm": 0, "acc_bytes": 1}),
        ([-2.0, -1.0], {"acc": 1, "acc_norm": 1, "acc_bytes": 1}),
        ([-1.0, -9.0], {"acc": 0, "acc_norm": 0, "acc_bytes": 0}),
    ],
)
def test_scores_are_compared_whole_per_character_and_per_byte(tmp_path, scores, right):
    found = task_of(tmp_path, LINE, delimiter="").figures(scores)
    bits = -scores[1] / 4 / math.log(2)
    assert found == {f"one/{name}": value for name, value in right.items()} | {"one/bpb": pytest.approx(bits)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "line 1: it is no JSON"),
        ("[]", "it is no object"),
        (LINE | {"context": 1}, "`context` must be a text"),
        (LINE | {"context": " "}, "`context` has no token, and .* give a text that is not empty"),
        (LINE | {"choices": ["a"]}, "`choices` must be a list of 2 to 64 texts"),
        (LINE | {"choices": ["a", ""]}, "`choices` must be a list of 2 to 64 texts"),
        (LINE | {"choices": ["a"] * 65}, "`choices` must be a list of 2 to 64 texts"),
        (LINE | {"answer": 2}, "`answer` must be the index of a choice, 0 to 1"),
        (LINE | {"answer": True}, "`answer` must be the index of a choice"),
        (LINE | {"context": "x" * 97}, r"are 102 tokens, of which the model takes 100"),
        (LINE | {"more": "x" * 2**20}, "it has more than 1048576 bytes"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, why):
    with pytest.raises(DataNotFound, match=rf"`training.evaluation.choices.tasks.one`: .*{why}"):
        task_of(tmp_path, line)


@pytest.mark.parametrize(
    ("context", "tensor", "sequence", "pieces", "multiple"),
    [(1, 1, False, None, 1), (1, 4, False, None, 1), (1, 4, True, None, 4), (2, 3, True, 4, 12), (2, 2, True, 4, 4)],
)
def test_inputs_can_be_cut_over_ranks(context, tensor, sequence, pieces, multiple):
    part = None if pieces is None else SimpleNamespace(pieces=pieces)
    config = SimpleNamespace(job=SimpleNamespace(parallelism=SimpleNamespace(sequence_parallel=sequence)))
    world = SimpleNamespace(mesh=SimpleNamespace(context=context, tensor=tensor))
    assert multiple_of_lengths(part, config, world) == multiple


def test_a_model_that_does_not_take_the_questions_is_named(tmp_path):
    task = task_of(tmp_path, LINE | {"context": "ab"}, longest=6)
    model = double_gpt(vocabularySize=256)
    require_fit("tasks.one", task, model, 3, 6)
    with pytest.raises(InvalidConfiguration, match=r"`tasks.one`: .* filled up to 8, a multiple of 4, .* takes 6"):
        require_fit("tasks.one", task, model, 4, 6)
    with pytest.raises(InvalidConfiguration, match=r"vocabulary of 195 .* `tasks\.one`, which is 196"):
        require_fit("tasks.one", task, double_gpt(vocabularySize=195), 1, 6)


def test_data_without_tokens_are_refused(tmp_path):
    path = write_chats(tmp_path / "task.jsonl", [LINE])
    job_ = job(small(evaluation={"choices": {"tasks": {"one": str(path)}}}))
    with pytest.raises(InvalidConfiguration, match=r"needs samples of `training.data` with a class for each token"):
        Supervised(JobConfig.model_validate(job_).training).data()


@torch.no_grad()
def test_rows_are_whole_after_packed_samples_of_the_same_size(tmp_path):
    """Red where a row is cut into the documents of what was evaluated before it."""
    task = task_of(tmp_path, LINE, LINE | {"context": "abcdef "})
    supervised = Supervised(JobConfig.model_validate(job(small())).training)
    samples = [task.sample(row) for row in range(len(task.rows))]
    inputs, targets = supervised.batch_of_lengths(samples, 1)
    microbatch = Microbatch((inputs, targets), torch.ones(len(samples)), 0.0, len(samples))
    starts = torch.arange(inputs.shape[1]).expand_as(inputs) // 2 * 2
    seed_everything(0)
    model = double_gpt(vocabularySize=256, sequenceLength=inputs.shape[1])
    supervised.use_loss_of(model)
    expected = supervised.token_losses(model, microbatch)
    model.use_context(documents := Documents(None))
    supervised.use_documents(documents)
    apart = supervised.token_losses(model, replace(microbatch, batch=Packed(inputs, targets, starts)))
    found = supervised.token_losses(model, microbatch)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert (apart - expected).abs().max() > 1e-3


def test_checkpoints_can_be_judged_by_a_task(tmp_path):
    data = Datasets([], None, choices=[task_of(tmp_path, LINE)])
    task = Supervised(JobConfig.model_validate(job(small())).training)
    assert [task.has_figure(name, data) for name in ("one/acc_norm", "two/acc", "one/loss")] == [True, False, False]


def test_questions_and_tokens_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "MAX_QUESTIONS", 1)
    with pytest.raises(DataNotFound, match="line 2: a task has at most 1 questions"):
        task_of(tmp_path, LINE, LINE)
    monkeypatch.setattr(choices, "MAX_TOKENS", 5)
    with pytest.raises(DataNotFound, match="line 1: the rows up to it have more than 5 tokens"):
        task_of(tmp_path, LINE)
    with pytest.raises(DataNotFound, match="has no question"):
        task_of(tmp_path, "")
    with pytest.raises(DataNotFound, match="cannot be read: No such file"):
        load_choices(ChoicesConfig(tasks={"one": str(tmp_path / "absent")}), 10)


def test_a_choice_without_tokens_of_its_own_is_refused(tmp_path, monkeypatch):
    alike = Codec(lambda texts: [np.arange(3, dtype=np.int32) for _ in texts], str)
    monkeypatch.setattr(choices, "load_codec", lambda *_: alike)
    with pytest.raises(DataNotFound, match=r"`choices\[0\]` adds no token to the context"):
        task_of(tmp_path, LINE)


def test_ranks_that_have_other_questions_are_refused(tmp_path):
    first, other = (task_of(tmp_path, LINE | {"answer": answer}) for answer in (0, 1))
    assert first.fingerprint != other.fingerprint != task_of(tmp_path, LINE, delimiter="").fingerprint
