"""Small chats for tests: tokenizers with chat templates, and files of conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.corpora import WORDS, sentences

SPECIAL = ("<pad>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|header|>", "<|/header|>", "<|eot|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<|header|>' + m['role'] + '<|/header|>\n\n' + (m['content'] | trim)"
    " + '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|header|>assistant<|/header|>\n\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As of models that think: what was thought before the last answer is left out.
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As of models that call tools: what each answer consists of can be marked.
CALLING = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for m in messages %}"
    "{% if m['role'] == 'tool' %}{% if loop.previtem['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n[' + (m['name'] or '') + '] ' + m['content'] }}"
    "{% if loop.last or loop.nextitem['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif m['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}"
    "{{ '\ncall: ' + call.function.name + ' ' + call.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
DATED = "{% if today is defined %}{{ today }}{% else %}{{ strftime_now('%Y') }}{% endif %}" + CHATML


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Spaces before a word are then left out of its place in the text.
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentences(number) for number in range(100)], trainer)
    # What a model's file may ask for, and data for training must not do.
    tokenizer.enable_truncation(4)
    return tokenizer.to_str()


VOCABULARY = 320


def write_tokenizer(folder: Path, template: str, *, in_config: bool = False) -> Path:
    """Write a tokenizer with a chat template, in a file of its own or in the tokenizer's config; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_trained())
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    if in_config:
        config["chat_template"] = template
    else:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def said(*texts: str) -> dict[str, Any]:
    """A line: the user and the assistant in turn."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[number % 2], "content": text} for number, text in enumerate(texts)]}


def words(number: int, count: int) -> str:
    """Some words that differ from number to number."""
    return " ".join(WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(count))


def conversations(count: int) -> list[dict[str, Any]]:
    """Lines of unlike lengths and of both forms."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        question, answer = words(number, 1 + number % 4), words(number + 3, 1 + number % 3)
        if number % 3 == 0:
            found.append({"prompt": question, "completion": answer})
        else:
            found.append(said(*[question, answer] * (number % 3)))
    return found


def write_chats(path: Path, lines: Sequence[object]) -> Path:
    """Write a file of JSON Lines; what is no text becomes JSON. Return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path
