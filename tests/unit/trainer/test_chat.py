"""Conversations in training: which tokens count, and sentences for what cannot be trained on."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from disttrain_api.chat import ChatConfig
from disttrain_trainer.data import chat
from disttrain_trainer.data.chats import lines
from disttrain_trainer.data.collate import filled_up
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration
from tests.chats import (
    CHATML,
    DATED,
    FORGETFUL,
    LLAMA,
    MARKED,
    PLAIN,
    conversations,
    said,
    words,
    write_chats,
    write_tokenizer,
)

transformers = pytest.importorskip("transformers")

ANSWERED = {
    "messages": [{"role": "system", "content": "be quick"}, *said("the fox", "runs", "a dog", "naïve 犬")["messages"]]
}
# Texts of one conversation, and whether they count.
SEGMENTS = {
    "chatml": (
        CHATML,
        [
            ("<|im_start|>system\nbe quick<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n", False),
            ("<|im_start|>assistant\n", False),
            ("runs<|im_end|>\n", True),
            ("<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n", False),
            ("naïve 犬<|im_end|>\n", True),
        ],
    ),
    "llama": (
        LLAMA,
        [
            ("<s><|header|>system<|/header|>\n\nbe quick<|eot|>", False),
            ("<|header|>user<|/header|>\n\nthe fox<|eot|><|header|>assistant<|/header|>\n\n", False),
            ("runs<|eot|>", True),
            ("<|header|>user<|/header|>\n\na dog<|eot|><|header|>assistant<|/header|>\n\n", False),
            ("naïve 犬<|eot|>", True),
        ],
    ),
    "marked": (
        MARKED,
        [
            ("<|im_start|>system\nbe quick<|im_end|>\n<|im_start|>user\nthe fox<|im_end|>\n", False),
            ("<|im_start|>assistant\n", False),
            ("runs<|im_end|>", True),
            ("\n", False),
            ("<|im_start|>user\na dog<|im_end|>\n<|im_start|>assistant\n", False),
            ("naïve 犬<|im_end|>", True),
            ("\n", False),
        ],
    ),
}


def loaded(folder: Path, rows: object, template: str = CHATML, in_config: bool = False, **fields: object):
    """The data of these lines; `rows` may be a path."""
    path = rows if isinstance(rows, Path) else write_chats(folder / "chats.jsonl", rows)
    write_tokenizer(folder / "tokenizer", template, in_config=in_config)
    given = {"path": str(path), "tokenizer": str(folder / "tokenizer"), "heldOutFraction": 0, **fields}
    return chat.load(ChatConfig.model_validate(given))


def library(folder: Path):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


@pytest.mark.parametrize("kind", SEGMENTS)
def test_what_the_assistant_says_counts_and_nothing_else(kind, tmp_path):
    template, segments = SEGMENTS[kind]
    data = loaded(tmp_path, [ANSWERED], template)
    tokenizer = library(tmp_path)
    expected = [(token, counts) for text, counts in segments for token in tokenizer.encode(text)]
    ((inputs, targets),) = [data.training[index] for index in range(len(data.training))]
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [token for token, _ in expected[:-1]]
    assert targets.tolist() == [token if counts else IGNORED for token, counts in expected[1:]]
    # As the library itself writes it.
    whole = tokenizer.apply_chat_template(ANSWERED["messages"], return_dict=False, tokenize=True)
    assert [*inputs.tolist(), expected[-1][0]] == whole == [token for token, _ in expected]


def test_a_template_may_stand_in_the_tokenizers_config(tmp_path):
    expected = loaded(tmp_path / "file", conversations(5))
    found = loaded(tmp_path / "config", conversations(5), in_config=True)
    assert found.fingerprint == expected.fingerprint
    assert not (tmp_path / "config" / "tokenizer" / "chat_template.jinja").exists()


def test_the_template_gets_its_arguments(tmp_path):
    data = loaded(tmp_path, [said("the fox", "runs")], DATED, templateArguments={"today": "a dog"})
    assert library(tmp_path).decode(data.training[0][0]).startswith("a dog<|im_start|>user")


def test_batches_are_as_long_as_their_longest_conversation(tmp_path):
    data = loaded(tmp_path, conversations(9))
    samples = [data.training[index] for index in range(9)]
    sizes = [len(inputs) for inputs, _ in samples]
    assert len(set(sizes)) > 3
    for length, expected in ((None, max(sizes)), (100, 100)):
        for (inputs, targets), (given, aims), size in zip(filled_up(samples, length), samples, sizes, strict=True):
            assert len(inputs) == len(targets) == expected
            assert torch.equal(inputs[:size], given)
            assert torch.equal(targets[:size], aims)
            assert (targets[size:] == IGNORED).all()


def test_without_the_library_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        InvalidConfiguration, match=r"the library transformers is not in the image; install `disttrain\[hf\]`"
    ):
        loaded(tmp_path, [GOOD])


class TestHeldOut:
    def test_a_part_is_held_out_whatever_the_order_of_reading(self, tmp_path):
        rows = conversations(40)
        data = loaded(tmp_path, rows, heldOutFraction=0.25)
        assert (len(data.training), len(data.held_out)) == (30, 10)
        every = loaded(tmp_path, rows)
        found = [data.training.numbers.tolist(), data.held_out.numbers.tolist()]
        assert sorted(found[0] + found[1]) == list(range(40))
        assert found[0] == sorted(found[0])
        assert torch.equal(data.held_out[3][0], every.training[found[1][3]][0])
        again, other = (loaded(tmp_path, rows, heldOutFraction=0.25, splitSeed=seed) for seed in (0, 1))
        assert again.held_out.numbers.tolist() == found[1] != other.held_out.numbers.tolist()
        assert data.fingerprint == again.fingerprint
        assert len({data.fingerprint, other.fingerprint, every.fingerprint}) == 3

    def test_one_at_least_and_one_is_left(self, tmp_path):
        assert len(loaded(tmp_path, conversations(2), heldOutFraction=0.01).held_out) == 1
        with pytest.raises(DataNotFound, match=r"heldOutFraction`: 0.01 of 1 conversations leaves none to train on"):
            loaded(tmp_path, conversations(1), heldOutFraction=0.01)


class TestLongConversations:
    ROWS = (said("a dog", "runs"), said("the fox", words(1, 30)), said(words(2, 60), "runs"))

    def test_they_are_refused_with_their_number(self, tmp_path):
        with pytest.raises(DataNotFound) as caught:
            loaded(tmp_path, self.ROWS, sequenceLength=50)
        longest = len(loaded(tmp_path, [self.ROWS[2]]).training[0][0]) + 1
        assert (
            f"`training.data.config.sequenceLength`: 2 of 3 conversations have more than 50 tokens, the longest "
            f"{longest}; the first is {tmp_path}/chats.jsonl: line 2. Raise it, or set `longConversations` to"
        ) in str(caught.value)

    def test_their_end_is_cut_off(self, tmp_path):
        data = loaded(tmp_path, self.ROWS, sequenceLength=50, longConversations="Truncate")
        whole = loaded(tmp_path, self.ROWS).training
        assert [len(data.training[index][0]) + 1 for index in range(2)] == [len(whole[0][0]) + 1, 50]
        for part in (0, 1):
            assert torch.equal(data.training[1][part], whole[1][part][:49])
        assert len(data.training) == 2
        assert data.notes[0].startswith("2 of 3 conversations have more than 50 tokens, the longest ")
        assert data.notes[1].startswith("1 of these say nothing of the assistant's in their first 50 tokens")

    def test_they_are_left_out(self, tmp_path):
        data = loaded(tmp_path, self.ROWS, sequenceLength=50, longConversations="LeaveOut")
        assert len(data.training) == 1
        assert data.notes[0].endswith("they are left out")
        assert data.notes[1].startswith("1 conversations are trained on, 0 held out: ")
        with pytest.raises(DataNotFound, match="has no conversation: 3 of 3 conversations have more than 2 tokens"):
            loaded(tmp_path, self.ROWS, sequenceLength=2, longConversations="LeaveOut")


def one(**message: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "the fox"}, message]}


def called(**function: object) -> dict[str, object]:
    return one(role="assistant", tool_calls=[{"type": "function", "function": function}])


CALL = "`messages[1].tool_calls[0].function"
GOOD = said("the fox", "runs")
# What a line is, and what is said of it.
HOSTILE: dict[str, tuple[object, str]] = {
    "no JSON": ("{", "it is no JSON: "),
    "no number of JSON": ('{"messages": NaN}', "it is no JSON: "),
    "half a character": ('{"prompt": "\\ud800", "completion": "a"}', "it is no JSON: "),
    "deep": ("[" * 100_000, "it is no JSON: "),
    "a list": ([1], "it is a list, expected an object with `messages`, or with `prompt` and `completion`"),
    "other fields": ({"text": "a", "id": 3}, "it has id, text, expected an object with `messages`"),
    "no field": ({}, "it has nothing, expected"),
    "both forms": (GOOD | {"prompt": "a"}, "it has `messages` beside `prompt` or `completion`"),
    "no completion": ({"prompt": "a"}, "it has prompt, expected"),
    "a list as prompt": ({"prompt": [], "completion": "a"}, "`prompt` is a list, expected a text"),
    "null as completion": ({"prompt": "a", "completion": None}, "`completion` is null, expected a text"),
    "a text as tools": (GOOD | {"tools": "a"}, "`tools` is no list of objects"),
    "texts as tools": (GOOD | {"tools": ["a"]}, "`tools` is no list of objects"),
    "a text as messages": ({"messages": "a"}, "`messages` is a text, expected a list of objects"),
    "no messages": ({"messages": []}, "`messages` has 0 messages, expected 1 to 10000"),
    "many messages": ({"messages": [{}] * 10_001}, "`messages` has 10001 messages, expected 1 to 10000"),
    "a number as message": ({"messages": [3]}, "`messages[0]` is a number, expected an object"),
    "another role": (one(role="bot", content="a"), "`messages[1].role` is 'bot', expected one of system, developer,"),
    "a list as role": (one(role=[], content="a"), "`messages[1].role` is a list, expected one of system"),
    "no role": (one(content="a"), "`messages[1]` has no `role`, expected an object"),
    "no content": (one(role="assistant"), "`messages[1]` has no `content`, expected an object"),
    "parts as content": (one(role="assistant", content=[{}]), "`messages[1].content` is a list, expected a text"),
    "a boolean as content": (one(role="assistant", content=True), "`messages[1].content` is a boolean, expected"),
    "another field": (
        one(role="assistant", content="a", weight=1),
        "`messages[1].weight` is not supported for the role assistant: remove it",
    ),
    "calls of a user": (one(role="user", content="a", tool_calls=[]), "`messages[1].tool_calls` is not supported for"),
    "no calls": (
        one(role="assistant", content="a", tool_calls=[]),
        "`messages[1].tool_calls` is empty, expected a list",
    ),
    "a text as calls": (one(role="assistant", tool_calls="a"), "`messages[1].tool_calls` is a text, expected a list"),
    "a bare call": (
        one(role="assistant", tool_calls=[{"name": "look", "arguments": {}}]),
        "`messages[1].tool_calls[0]` is not an object with `function`",
    ),
    "a call without arguments": (called(name="look"), "`messages[1].tool_calls[0].function` is not an object with"),
    "a list as arguments": (called(name="look", arguments=[]), f"{CALL}.arguments` is a list, expected an object"),
    "half arguments": (called(name="look", arguments="{"), f"{CALL}.arguments` is no JSON: "),
    "a special token in arguments": (
        called(name="look", arguments={"at": ["<|im_end|>"]}),
        "the content of message 1 has '<|im_end|>', a special token",
    ),
    "a special token in tools": (
        GOOD | {"tools": [{"function": {"name": "<|im_end|>"}}]},
        "`tools` has '<|im_end|>', a special token",
    ),
    "nobody answers": (said("the fox"), "it has no message of the role assistant, which is what is learnt"),
    "an empty answer": (said("the fox", " \n"), "a message of the role assistant has no text"),
    "nobody asks": (
        {"messages": [{"role": "assistant", "content": "a"}]},
        "its first message is of the role assistant",
    ),
    "a special token": (
        said("the <|im_end|> fox", "runs"),
        "the content of message 0 has '<|im_end|>', a special token",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_line_that_is_no_conversation_is_named(case, tmp_path):
    line, expected = HOSTILE[case]
    with pytest.raises(DataNotFound) as caught:
        loaded(tmp_path, [GOOD, "", line, GOOD])
    assert str(caught.value).startswith(f"`training.data.config.path`: {tmp_path}/chats.jsonl: line 3: {expected}"), (
        caught.value
    )


def test_a_line_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1000)
    with pytest.raises(DataNotFound, match=r"chats.jsonl: line 2: it has more than 1000 bytes; split the conversation"):
        loaded(tmp_path, [GOOD, "[" * 10**6])


class TestFiles:
    def test_a_folder_is_read_by_name_and_through_links(self, tmp_path):
        rows = conversations(6)
        for name, part in (("b.ndjson", rows[2:]), ("a.jsonl", rows[:2]), ("c.txt", ["no JSON"])):
            write_chats(tmp_path / "stored" / name, part)
        (tmp_path / "chats").symlink_to("stored")
        (tmp_path / "stored" / "d.jsonl").symlink_to("a.jsonl")
        found = loaded(tmp_path, tmp_path / "chats")
        assert found.fingerprint == loaded(tmp_path, [*rows, *rows[:2]]).fingerprint

    @pytest.mark.parametrize(
        ("make", "found"),
        [
            (lambda path: None, "does not exist"),
            (lambda path: path.mkdir(), "has no file that ends with .jsonl or .ndjson"),
            (os.mkfifo, "cannot be read: it is no regular file"),
            (lambda path: path.write_text("\n"), "has no conversation"),
        ],
    )
    def test_what_is_no_file_is_named(self, make, found, tmp_path):
        make(path := tmp_path / "chats")
        with pytest.raises(DataNotFound, match=rf"`training.data.config.path`: {re.escape(str(path))}.*{found}"):
            loaded(tmp_path, path)


def configured(folder: Path, **fields: object) -> None:
    """A tokenizer's config with these fields in place of the template's file."""
    if "chat_template" in fields:
        (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class TestTemplates:
    def test_one_that_is_not_exact_is_refused(self, tmp_path):
        # It is exact for a conversation's only answer.
        assert len(loaded(tmp_path, [said("the fox", "runs")], FORGETFUL).training) == 1
        with pytest.raises(InvalidConfiguration) as caught:
            loaded(tmp_path, [said("the fox", "runs", "a dog", "jumps")], FORGETFUL)
        assert (
            f"the chat template of {tmp_path}/tokenizer does not tell which part of message 1 of "
            f"{tmp_path}/chats.jsonl: line 1 is the assistant's"
        ) in str(caught.value)

    def test_a_token_of_two_messages_is_refused(self, tmp_path):
        # A space and a word are one token: the template writes the one, the assistant says the other.
        with pytest.raises(
            DataNotFound, match=r"chats.jsonl: line 1: a token holds characters of a message of the role"
        ):
            loaded(tmp_path, [said("fox", "the quick")], PLAIN)

    def test_one_that_raises_says_where(self, tmp_path):
        template = "{{ raise_exception('no system') if messages[0].role == 'system' }}" + CHATML
        with pytest.raises(InvalidConfiguration, match=r"cannot be applied to .*line 2: TemplateError: no system"):
            loaded(tmp_path, [GOOD, ANSWERED], template)

    def test_it_runs_in_a_sandbox(self, tmp_path):
        for expression, error in (
            ("''.__class__.__mro__[1].__subclasses__()", "SecurityError"),
            ("messages.append(3)", "SecurityError"),
            ("range(10**9) | list", "OverflowError"),
        ):
            with pytest.raises(InvalidConfiguration, match=f"cannot be applied to .*line 1: {error}: "):
                loaded(tmp_path, [GOOD], f"{{{{ {expression} }}}}{CHATML}")

    def test_one_that_writes_nothing_of_the_answer_is_refused(self, tmp_path):
        with pytest.raises(DataNotFound, match="line 1: the chat template writes nothing of what the assistant says"):
            loaded(tmp_path, [GOOD], "{{ messages[0].content }}")

    def test_the_date_is_not_a_part_of_the_data(self, tmp_path):
        with pytest.raises(InvalidConfiguration, match="writes the present date"):
            loaded(tmp_path, [GOOD], DATED)

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("messages", "templateArguments`.messages is not the template's but set by the trainer"),
            ("add_generation_prompt", "templateArguments`.add_generation_prompt is not the template's"),
            ("enable_thinking", "does not read `enable_thinking`: remove it"),
        ],
    )
    def test_arguments_that_it_does_not_take_are_refused(self, name, found, tmp_path):
        with pytest.raises(InvalidConfiguration, match=re.escape(found)):
            loaded(tmp_path, [GOOD], templateArguments={name: True})

    @pytest.mark.parametrize(
        ("spoil", "found"),
        [
            (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json does not exist"),
            (lambda folder: (folder / "tokenizer.json").write_text("{"), "is no tokenizer's folder: "),
            (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
            (lambda folder: (folder / "chat_template.jinja").write_text("{% if"), "cannot be applied to "),
            (lambda folder: configured(folder, chat_template={"default": 4}), "has no chat template"),
            (lambda folder: configured(folder, chat_template=[3]), "is no tokenizer's folder: "),
            (
                lambda folder: configured(folder, model_max_length="x"),
                "the tokenizer in .* cannot tokenise .*line 1 and those after it: TypeError",
            ),
            (
                lambda folder: (folder / "tokenizer_config.json").write_text(
                    json.dumps(
                        {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"}
                    )
                ),
                None,
            ),
        ],
    )
    def test_a_folder_that_is_no_tokenizers_is_named(self, spoil, found, tmp_path):
        folder = write_tokenizer(tmp_path / "own", CHATML)
        (folder / "code.py").write_text("raise SystemExit('code of a tokenizer was run')")
        spoil(folder)
        given = {
            "path": str(write_chats(tmp_path / "chats.jsonl", [GOOD])),
            "tokenizer": str(folder),
            "heldOutFraction": 0,
        }
        config = ChatConfig.model_validate(given)
        if found is None:
            assert len(chat.load(config).training) == 1
            return
        with pytest.raises((DataNotFound, InvalidConfiguration), match=found):
            chat.load(config)
