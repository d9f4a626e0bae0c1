"""Conversations with tools and reasoning: both count, with and without marks in the template, and no template leaves
them out."""

import json
import re

import pytest
import torch

from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.chats import CALLING, conversations, said
from tests.unit.trainer.test_chat import ANSWERED, GOOD, called, library, loaded

pytest.importorskip("transformers")

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {}}}}}
ASKED = {
    "tools": [LOOK],
    "messages": [
        {"role": "system", "content": "be quick"},
        {"role": "user", "content": "the fox"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "the fox"}'}},
                {"function": {"name": "look", "arguments": {"at": "naïve 犬"}}},
            ],
        },
        {"role": "tool", "name": "look", "tool_call_id": "1", "content": "runs", "tool_calls": None},
        {"role": "tool", "name": "look", "content": "over"},
        {"role": "assistant", "content": "the fox runs"},
        {"role": "user", "content": "a dog"},
        {"role": "assistant", "content": "jumps"},
    ],
}


def unmarked(template):
    """A template without the marks around what the assistant says."""
    return re.sub(r"\{% (end)?generation %\}", "", template)


UNMARKED = unmarked(CALLING)


def test_calls_of_tools_count_and_what_tools_answer_does_not(tmp_path):
    data = loaded(tmp_path, [ASKED], UNMARKED)
    tokenizer = library(tmp_path)
    inputs, targets = data.training[0]
    written = tokenizer.decode(inputs)
    assert written.startswith(f"<|im_start|>system\n{json.dumps(LOOK)}\n<|im_end|>")
    runs, counted = [], False
    for token in targets.tolist():
        if token != IGNORED and counted:
            runs[-1].append(token)
        elif token != IGNORED:
            runs.append([token])
        counted = token != IGNORED
    calls = '\ncall: look {"at": "the fox"}\ncall: look {"at": "naïve 犬"}<|im_end|>\n'
    assert list(map(tokenizer.decode, runs)) == [calls, "the fox runs<|im_end|>\n", "jumps<|im_end|>\n"]


@pytest.mark.parametrize("rows", [[ASKED], [ANSWERED, said("the fox", "runs")], conversations(9)])
def test_without_marks_the_same_counts_as_with_them(rows, tmp_path):
    found, expected = (
        loaded(tmp_path / name, rows, template) for name, template in (("plain", UNMARKED), ("marked", CALLING))
    )
    assert len(found.training) == len(expected.training) == len(rows)
    for index in range(len(rows)):
        for part in (0, 1):
            assert torch.equal(found.training[index][part], expected.training[index][part])


REASONED = {
    "messages": [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "reasoning_content": "a dog jumps", "content": "runs"},
    ]
}
THINKING = CALLING.replace(
    "{{ m['content'] }}",
    "{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}{{ m['content'] }}",
)


@pytest.mark.parametrize(
    "template", [THINKING, re.sub(r"\{% (end)?generation %\}", "", THINKING)], ids=["marked", "not"]
)
def test_reasoning_counts_as_what_the_assistant_says(template, tmp_path):
    data = loaded(tmp_path, [REASONED, GOOD], template)
    counted = [token for token in data.training[0][1].tolist() if token != IGNORED]
    assert library(tmp_path).decode(counted) == "<think>a dog jumps</think>runs<|im_end|>\n"


@pytest.mark.parametrize("name", ["tools", "tool_calls", "reasoning_content"])
def test_a_template_that_would_leave_them_out_is_refused(name, tmp_path):
    calls = called(name="look", arguments={})
    row = {"tools": GOOD | {"tools": [LOOK]}, "tool_calls": calls, "reasoning_content": REASONED}[name]
    with pytest.raises(
        InvalidConfiguration, match=rf"does not read `{name}`, which {tmp_path}/chats.jsonl: line 1 has"
    ):
        loaded(tmp_path, [row])
