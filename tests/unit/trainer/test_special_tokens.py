"""Tokens that a tokenizer puts around a text: prompts and contexts of evaluations begin with those before it."""

import json

import pytest

from disttrain_api.choices import ChoicesConfig
from disttrain_api.samples import SamplesConfig
from disttrain_trainer.data.choices import load_choices
from disttrain_trainer.data.prompts import load_prompts
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import DataNotFound
from tests.chats import write_chats

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

BEGIN, END, MARK, UNKNOWN = 1, 2, 3, 9
VOCABULARY = {"<s>": BEGIN, "</s>": END, "<mark>": MARK, "Paris": 4, "is": 5, "in": 6, "France": 7, "?": UNKNOWN}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture
def tokenizer(tmp_path):
    """Write a tokenizer of words that puts what `around` says around a text; return its folder."""

    def write(around, **named):
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.add_special_tokens(["<s>", "</s>", "<mark>"])
        special = [(token, VOCABULARY[token]) for token in ("<s>", "</s>", "<mark>")]
        words.post_processor = tokenizers.processors.TemplateProcessing(single=around, special_tokens=special)
        folder = tmp_path / "tokenizer"
        folder.mkdir(exist_ok=True)
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(named or NAMED))
        return folder

    return write


@pytest.mark.parametrize(
    ("around", "after"), [("$A", 0), ("<s> $A", 0), ("<s> <mark> $A", 0), ("<s> $A </s>", 1), ("$A </s>", 1)]
)
def test_a_prompt_is_what_the_library_makes_of_it_without_what_ends_it(tokenizer, around, after):
    folder, texts = tokenizer(around), ["Paris is in", "is"]
    library = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    whole = [library(text)["input_ids"] for text in texts]
    found = load_prompts(SamplesConfig(prompts=texts, tokenizer=str(folder)), 99)
    assert [row.tolist() for row in found.rows] == [row[: len(row) - after] for row in whole]
    assert found.text_after(0, [7]) == " France"


@pytest.mark.parametrize("named", [NAMED, {"eos_token": "</s>"}])
def test_what_begins_a_text_and_is_spelled_out_is_not_there_twice(tokenizer, named):
    """As of a chat's template, which writes it."""
    begin = next(iter(named.values()))
    folder = tokenizer(f"{begin} $A", **named)
    found = load_prompts(SamplesConfig(prompts=[f"{begin} Paris", f"Paris {begin}"], tokenizer=str(folder)), 99)
    token = VOCABULARY[begin]
    assert [row.tolist() for row in found.rows] == [[token, 4], [token, 4, token]]


def rows_of(tmp_path, folder, **line):
    """The tokens of each row, those of its context, and those that count."""
    path = write_chats(tmp_path / "task.jsonl", [line | {"answer": 0}])
    (task,) = load_choices(ChoicesConfig(tasks={"one": str(path)}, tokenizer=str(folder)), 99)
    counted = [[token for token in task.sample(row)[1].tolist() if token != IGNORED] for row in range(len(task.rows))]
    return [row.tolist() for row in task.rows], task.contexts, counted


@pytest.mark.parametrize(
    ("around", "before"),
    [("$A", []), ("<s> $A", [BEGIN]), ("<s> <mark> $A </s>", [BEGIN, MARK]), ("$A </s>", [])],
)
def test_a_context_begins_with_them_and_nothing_is_between_it_and_its_choices(tmp_path, tokenizer, around, before):
    found = rows_of(tmp_path, tokenizer(around), context="Paris is ", choices=["in France", "Paris"])
    rows = [[*before, 4, 5, 6, 7], [*before, 4, 5, 4]]
    assert found == (rows, [len(before) + 2] * 2, [[6, 7], [4]])


def test_a_context_that_spells_it_out_has_it_once(tmp_path, tokenizer):
    found = rows_of(tmp_path, tokenizer("<s> $A"), context="<s> Paris is", choices=["in", "<s> in"])
    assert found == ([[BEGIN, 4, 5, 6], [BEGIN, 4, 5, BEGIN, 6]], [3, 3], [[6], [BEGIN, 6]])


@pytest.mark.parametrize(
    ("around", "named", "begin"),
    [
        ("<s> $A", NAMED, BEGIN),
        ("<s> $A </s>", NAMED, BEGIN),
        ("$A", NAMED, BEGIN),
        ("$A", {"eos_token": "</s>"}, END),
    ],
)
@pytest.mark.parametrize("context", ["", " "])
def test_an_empty_context_is_the_token_that_begins_a_text(tmp_path, tokenizer, around, named, begin, context):
    found = rows_of(tmp_path, tokenizer(around, **named), context=context, choices=["in France", "Paris"])
    assert found == ([[begin, 6, 7], [begin, 4]], [1, 1], [[6, 7], [4]])


def test_after_an_empty_context_it_is_not_there_twice(tmp_path, tokenizer):
    found = rows_of(tmp_path, tokenizer("$A"), context="", choices=["<s> in", "in"])
    assert found == ([[BEGIN, 6], [BEGIN, 6]], [1, 1], [[6], [6]])


def test_without_such_a_token_an_empty_context_is_refused(tmp_path, tokenizer):
    folder = tokenizer("$A", pad_token="?")
    with pytest.raises(DataNotFound, match=r"line 1: `context` has no token, and without .*`eos_token`"):
        rows_of(tmp_path, folder, context="", choices=["in", "Paris"])
