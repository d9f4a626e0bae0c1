"""Conversations with tools: calls count, with and without marks in the template, and no template leaves them out."""

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
UNMARKED = re.sub(r"\{% (end)?generation %\}", "", CALLING)


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


@pytest.mark.parametrize("name", ["tools", "tool_calls"])
def test_a_template_that_would_leave_them_out_is_refused(name, tmp_path):
    row = GOOD | {"tools": [LOOK]} if name == "tools" else called(name="look", arguments={})
    with pytest.raises(
        InvalidConfiguration, match=rf"does not read `{name}`, which {tmp_path}/chats.jsonl: line 1 has"
    ):
        loaded(tmp_path, [row])
