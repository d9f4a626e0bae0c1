"""Texts after prompts: what transformers' `generate` writes, token by token, in every layout."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from disttrain_api.samples import SamplesConfig
from disttrain_trainer.data.prompts import load_prompts
from disttrain_trainer.metrics import samples_file
from disttrain_trainer.metrics.samples_file import sample_line
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.samples import _filled, next_tokens
from tests.chats import write_chats
from tests.suites import GATE
from tests.unit.trainer.layouts import CONTEXT, PIPELINE, RING, SHARD, TENSOR
from tests.unit.trainer.server_jobs import a_job, ended
from tests.unit.trainer.test_choices import by_hand as figures_by_hand
from tests.unit.trainer.test_transformers import library_model
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.user_code import double_gpt, double_moe_gpt
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

VOCABULARY, LENGTH, NEW = 40, 96, 20
CONFIG = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "max_position_embeddings": LENGTH}
GPT = {"vocabularySize": VOCABULARY, "sequenceLength": LENGTH}
EXPERTS = {**GPT, "capacityFactor": 0.5}
# The second one grows beyond the first length that inputs are filled up to.
PROMPTS = [[3, 5, 7], [11] * 50, [2], [9, 8, 7, 6, 5, 4], [30, 31]]
DRAWN = {"temperature": 1.3, "topK": 7}
EVERYTHING = {TENSOR: 2, "sequenceParallel": True, "vocabularyParallel": True}
SHARED_EXPERTS = {SHARD: 2, "expertParallelDegree": 2}
CHUNKS = {"loss": {"chunks": 3}}
STAGES = {"pipeline": {"schedule": "Interleaved1F1B", "stagesPerRank": 2, "microbatches": 2}}

# ranks, parallelism, model, changes of the samples, changes of the training
ALL_LAYOUTS = {
    "pp2": (2, {PIPELINE: 2}, "llama", {}, {}),
    "tp2, everything": (2, EVERYTHING, "llama", {}, {}),
    "fsdp2, drawn": (2, {SHARD: 2}, "llama", DRAWN, {}),
    "one rank": (1, {}, "llama", {}, {}),
    "one rank, qwen3": (1, {}, "qwen3", {}, {}),
    "one rank, drawn": (1, {}, "llama", DRAWN, {}),
    "one process, two devices": (1, {"devicesPerProcess": 2}, "llama", {}, {}),
    "dp2": (2, {}, "llama", {}, {}),
    "dp2, mixtral": (2, {}, "mixtral", {}, {}),
    "dp2, compiled": (2, {}, "llama", {}, {"compile": True}),
    "dp2, LocalSGD": (2, {"dataParallel": {"mode": "LocalSGD"}}, "llama", {}, {}),
    "fsdp2": (2, {SHARD: 2}, "llama", {}, {}),
    "fsdp2 + ep2": (2, SHARED_EXPERTS, "mixtral", {}, {}),
    "tp2": (2, {TENSOR: 2}, "qwen3", {}, {}),
    "tp2, everything, drawn": (2, EVERYTHING, "llama", DRAWN, {}),
    "cp2": (2, {CONTEXT: 2}, "llama", {}, {}),
    "cp2, ring": (2, {CONTEXT: 2, **RING}, "llama", {}, {}),
    "cp2, ring, drawn": (2, {CONTEXT: 2, **RING}, "llama", DRAWN, {}),
    "pp2, mixtral": (2, {PIPELINE: 2}, "mixtral", {}, {}),
    "pp2, two stages per rank, drawn": (2, {PIPELINE: 2, **STAGES}, "llama", DRAWN, {}),
    "pp2, PipeDream": (2, {PIPELINE: 2, "pipeline": {"schedule": "PipeDream"}}, "llama", {}, {}),
    "gpt": (1, {}, "gpt", {}, {}),
    "gpt, fsdp2": (2, {SHARD: 2}, "gpt", {}, {}),
    "gpt, tp2, everything": (2, EVERYTHING, "gpt", {}, {}),
    "gpt, pp2": (2, {PIPELINE: 2}, "gpt", {}, {}),
    "gpt, experts": (1, {}, "experts", {}, {}),
    "gpt, experts, fsdp2 + ep2": (2, SHARED_EXPERTS, "experts", {}, {}),
    "fsdp2, logits in chunks": (2, {SHARD: 2}, "llama", {}, CHUNKS),
    "tp2, everything, logits in chunks": (2, EVERYTHING, "llama", {}, CHUNKS),
    "pp2, logits in chunks": (2, {PIPELINE: 2}, "llama", {}, CHUNKS),
    "fsdp2 x tp2, everything": (4, {SHARD: 2, **EVERYTHING}, "llama", {}, {}),
    "pp2 x cp2": (4, {PIPELINE: 2, CONTEXT: 2}, "llama", DRAWN, {}),
}
LAYOUTS = dict(list(ALL_LAYOUTS.items())[:3]) if GATE else ALL_LAYOUTS
STILL = {"steps": 1, "optimizer": {"name": "SGD", "learningRate": 1e-300}}


def write_words(folder):
    """Write a tokenizer in whose texts each token is a word of its own; return its folder."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    return folder


def text_of(tokens):
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_words(tmp_path_factory.mktemp("samples") / "words")


def built(model, **config):
    seed_everything(0)
    if model == "gpt":
        return double_gpt(**GPT)
    if model == "experts":
        return double_moe_gpt(**EXPERTS)
    return double_transformers(model, **CONFIG, **config)


@torch.no_grad()
def by_the_library(family, **config):
    """What the library writes after each prompt."""
    own, theirs = built(family, **config), library_model(family, **CONFIG, **config).eval()
    theirs.load_state_dict(own.state_dict())
    return [
        theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


@torch.no_grad()
def by_hand(model, end, drawn):
    """The same by a plain loop, without anything of the trainer's but the model."""
    module, texts = built(model).eval(), []
    for number, prompt in enumerate(PROMPTS):
        tokens = []
        while len(tokens) < NEW and tokens[-1:] != [end]:
            scores = module(torch.tensor([[*prompt, *tokens]]))[0, -1].numpy()
            if drawn:
                likely = np.sort(np.argsort(-scores)[: drawn["topK"]])
                weights = np.exp((scores[likely] - scores.max()) / drawn["temperature"])
                wanted = np.random.default_rng((0, 1, number, len(tokens))).random() * weights.sum()
                tokens.append(int(likely[np.searchsorted(weights.cumsum(), wanted, side="right")]))
            else:
                tokens.append(int(scores.argmax()))
        texts.append(tokens)
    return texts


@pytest.fixture(scope="module")
def end():
    """A token that ends some texts of each of the library's models early, and not all."""
    texts = {family: by_the_library(family, eos_token_id=None) for family in ("llama", "qwen3", "mixtral")}
    for token in range(VOCABULARY):
        ends = [[token in text for text in found] for found in texts.values()]
        if all(any(one) and not all(one) for one in ends):
            return token
    raise AssertionError(texts)


def case_of(folder, end, parallelism, model, samples, changes):
    arguments = {"family": model, **CONFIG, "eos_token_id": end}
    described = {"entrypoint": "tests.unit.trainer.transformers_code:double_transformers", "config": arguments}
    if model in ("gpt", "experts"):
        described = user("double_gpt", **GPT) if model == "gpt" else user("double_moe_gpt", **EXPERTS)
    tokens = {"kind": "Tokens", "sequenceLength": LENGTH, "vocabularySize": VOCABULARY, "size": 12}
    samples = {"prompts": list(map(text_of, PROMPTS)), "maxNewTokens": NEW, "tokenizer": str(folder), **samples}
    training = small(
        model=described,
        data={"name": "synthetic", "config": tokens},
        evaluation={"batchSize": 2, "samples": samples, "onFailure": "Fail"},
        **STILL | {"globalBatchSize": 8},
        **changes,
    )
    return [{"training": training, "parallelism": parallelism}]


@pytest.fixture(scope="module")
def found(folder, end, tmp_path_factory):
    """Where the results of each layout are."""
    folders = {}
    for world in sorted({ranks for ranks, *_ in LAYOUTS.values()}):
        cases = {name: case_of(folder, end, *rest) for name, (ranks, *rest) in LAYOUTS.items() if ranks == world}
        root = tmp_path_factory.mktemp(f"world-of-{world}")
        results = run_cases(root, world, cases)
        assert {name: result["errors"] for name, result in results.items()} == {name: [None] for name in cases}
        folders |= {name: root / name / "test" for name in cases}
    return folders


@pytest.fixture(scope="module")
def failed(folder, tmp_path_factory):
    """A job whose held-out samples rank 1 evaluates, and not the prompts; and where its results are."""
    (run,) = case_of(folder, None, {}, "gpt", {}, {})
    arguments = {"shortest": LENGTH, "rank": 1, **GPT}
    run["training"]["model"] = user("gpt_without_short_inputs", **arguments)
    run["training"]["evaluation"]["onFailure"] = "Warn"
    root = tmp_path_factory.mktemp("failed")
    return run_cases(root, 2, {"one": [run]})["one"], root / "one" / "test"


def test_where_one_replica_fails_all_report_it(failed):
    result, folder = failed
    assert result["errors"] == [None]
    assert result["report"].evaluation_failure == "the evaluation after step 1 failed on rank 1: ValueError"
    assert not (folder / "samples.jsonl").exists()


SERVED = {"workers of one rank": {}, "one worker of a tensor group": {"ranks_per_pod": 2, "degrees": {TENSOR: 2}}}
ASKED = [
    {"context": f"w{number}", "choices": ["w4", f"w{2 * number} w7"], "answer": number % 2} for number in range(1, 9)
]


@pytest.mark.parametrize("workers", SERVED)
@pytest.mark.parametrize("changes", [{}, CHUNKS], ids=["whole logits", "logits in chunks"])
def test_with_parameter_servers_the_leader_finds_the_same(tmp_path, folder, expected, workers, changes):
    (run,) = case_of(folder, None, {}, "gpt", {}, changes)
    tasks = {"asked": str(write_chats(tmp_path / "asked.jsonl", ASKED))}
    run["training"]["evaluation"]["choices"] = {"tasks": tasks, "tokenizer": str(folder)}
    settings = {"parameterServer": {"groupReduce": "WithinGroup"}} if SERVED[workers] else {}
    with a_job(tmp_path, run["training"], workers=SERVED[workers], **settings) as running:
        code, report = ended(running.workers[0], 0)
        assert (code, report.done, report.evaluation_failure) == (0, True, None), running.workers[0].text(0, "err")
    texts = read_samples(tmp_path / "storage" / "test")
    assert [line["text"] for line in texts] == [f" {text_of(tokens)}" for tokens in expected["gpt"]]
    wanted = figures_by_hand(built("gpt").eval(), lambda text: [int(word[1:]) for word in text.split()], ASKED)
    assert {name: report.metrics[f"asked/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-10)


def read_samples(folder: Path):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(end):
    greedy = {family: by_the_library(family, eos_token_id=end) for family in ("llama", "qwen3", "mixtral")}
    alone = {model: by_hand(model, None, None) for model in ("gpt", "experts")}
    return {**greedy, **alone, "drawn": by_hand("llama", end, DRAWN)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_writes_what_the_library_writes(found, expected, layout):
    _, _, model, samples, _ = LAYOUTS[layout]
    wanted, lines = expected["drawn" if samples else model], read_samples(found[layout])
    assert [(line["step"], line["prompt"]) for line in lines] == [(1, text_of(prompt)) for prompt in PROMPTS]
    assert [line["text"] for line in lines] == [f" {text_of(tokens)}" for tokens in wanted]
    events = EventAccumulator(str(found[layout] / "tensorboard")).Reload()
    for number, line in enumerate(lines):
        (event,) = events.Tensors(f"samples/{number}/text_summary")
        assert event.step == 1
        assert event.tensor_proto.string_val[0].decode() == f"    {line['prompt']}\n\n→\n\n    {line['text']}"


def test_some_texts_end_early_and_they_differ(expected, end):
    lengths = {len(text) for model in ("llama", "qwen3", "mixtral") for text in expected[model]}
    assert NEW in lengths
    assert len(lengths) > 2
    assert expected["drawn"] != expected["llama"]
    assert by_hand("llama", end, None) == expected["llama"]


@pytest.mark.parametrize(
    ("length", "longest", "multiple", "filled"),
    [(10, 500, 1, 64), (64, 500, 1, 64), (65, 500, 1, 128), (470, 500, 1, 500), (10, 500, 24, 72), (480, 500, 24, 504)],
)
def test_inputs_are_filled_up_to_few_lengths(length, longest, multiple, filled):
    assert _filled(length, longest, multiple) == filled


def test_tokens_are_drawn_in_proportion_to_their_probabilities():
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log()

    def drawn(part, temperature=1.0, top_k=None):
        return int(next_tokens(logits, [part], temperature, top_k))

    assert [drawn(part) for part in (0.0, 0.09, 0.11, 0.29, 0.31, 0.999)] == [0, 0, 1, 1, 2, 2]
    # The two most probable have 2 of 9 and 7 of 9.
    assert [drawn(part, top_k=2) for part in (0.0, 0.21, 0.23)] == [1, 1, 2]
    # Squares of the probabilities: 1, 4 and 49 of 54.
    assert [drawn(part, temperature=0.5) for part in (0.018, 0.02, 0.09, 0.1)] == [0, 1, 1, 2]
    assert drawn(0.0, top_k=1) == 2


def test_a_text_of_others_is_one_line_of_the_log_without_effect():
    line = sample_line(3, "a\n" * 100, "b\nstep: 4\x1b[31m\u202e\r" + "c" * 5000)
    assert line.isprintable()
    assert line.startswith('sample: 3  "a\\na\\n')
    assert '" … 200 characters → "b\\nstep: 4\\u001b[31m\\u202e\\rccc' in line
    assert line.endswith('" … 5016 characters')
    assert len(line) < 4400


def test_the_file_of_texts_begins_anew_where_it_has_become_long(tmp_path, monkeypatch):
    file = tmp_path / "samples.jsonl"
    monkeypatch.setattr(samples_file, "MAX_FILE_BYTES", 3)
    for text in ("1234", "567", "89"):
        samples_file.make_room(file)
        with file.open("a") as lines:
            lines.write(text)
    assert file.read_text() == "56789"
    samples_file.make_room(file)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"samples.1.jsonl": "56789"}


def config_of(**fields):
    return SamplesConfig.model_validate(fields, by_alias=True)


def test_without_a_tokenizer_bytes_are_the_tokens():
    prompts = load_prompts(config_of(prompts=["é", "ab"], maxNewTokens=2), 4)
    assert [row.tolist() for row in prompts.rows] == [[0xC3, 0xA9], [97, 98]]
    assert (prompts.longest, prompts.vocabulary, prompts.codec.end) == (3, 196, None)
    assert prompts.text_after(1, [0xC3, 0xA9, 0xC3, 300]) == "é��"


def test_a_prompt_that_is_too_long_is_refused_and_not_cut(folder):
    fields = {"tokenizer": str(folder), "maxNewTokens": 3}
    load_prompts(config_of(prompts=["w1 w2"], **fields), 5)
    with pytest.raises(InvalidConfiguration, match=r"samples\.prompts\[1\]` is 3 tokens, with `maxNewTokens` 6, .* 5"):
        load_prompts(config_of(prompts=["w1", "w1 w2 w3"], **fields), 5)
    with pytest.raises(InvalidConfiguration, match=r"samples\.prompts\[0\]` has no token"):
        load_prompts(config_of(prompts=[" "], **fields), 5)


def test_other_tokens_are_another_fingerprint(folder):
    one, other, bytes_ = (
        load_prompts(config_of(prompts=["w1 w2"], tokenizer=str(folder)), 99),
        load_prompts(config_of(prompts=["w1 w3"], tokenizer=str(folder)), 99),
        load_prompts(config_of(prompts=["w1 w2"]), 99),
    )
    assert len({prompts.fingerprint for prompts in (one, other, bytes_)}) == 3
