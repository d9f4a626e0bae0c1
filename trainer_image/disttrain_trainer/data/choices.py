"""Questions with several choices, from JSON Lines files, as rows of tokens: a context with one of its choices.

What is tokenised, and what counts as a choice's tokens, is lm-evaluation-harness's: a context and its choice are
tokenised as one text, which begins with the special tokens that the tokenizer puts there, and what is longer than the
tokens of the context alone is the choice's. White space at the end of a context belongs to its choices. An empty
context is the token that begins a text, or else the one that ends it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic_core import from_json
from torch import Tensor

from disttrain_api.choices import FIELD, ChoicesConfig
from disttrain_trainer.data.tokenizer import Codec, Tokens, load_codec
from disttrain_trainer.losses import IGNORED
from disttrain_trainer.runtime.errors import DataNotFound, shown
from disttrain_trainer.runtime.files import numbered_lines

MAX_LINE_BYTES = 2**20
MAX_QUESTIONS = 50_000
MAX_CHOICES = 64
MAX_TOKENS = 2**25
"""The most tokens of all rows of a task, which are held in memory: 128 MiB."""


@dataclass(frozen=True)
class Question:
    """A line of the file."""

    context: str
    choices: list[str]
    answer: int
    place: str
    """File and line."""


@dataclass(frozen=True)
class ChoiceTask:
    """The questions of a task. Rows are in the order of the questions, and of the choices of each."""

    name: str
    questions: Sequence[Question]
    rows: Sequence[Tokens]
    contexts: Sequence[int]
    """Tokens of the context, of each row."""

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest input: of a row all but the last."""
        return max(map(len, self.rows)) - 1

    @cached_property
    def vocabulary(self) -> int:
        """All tokens are below."""
        return max(int(row.max()) for row in self.rows) + 1

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Rows from the longest to the shortest, so that those of a batch are filled up by little."""
        return np.argsort([-len(row) for row in self.rows], kind="stable")

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that differ where tokens or answers do."""
        digest = hashlib.sha256()
        for row, context in zip(self.rows, self.contexts, strict=True):
            digest.update(np.array([len(row), context, *row], "<i8").tobytes())
        lengths = [(len(one.choices), one.answer) for one in self.questions]
        digest.update(np.array(lengths, "<i8").tobytes())
        return digest.hexdigest()

    def sample(self, row: int) -> tuple[Tensor, Tensor]:
        """Return all tokens but the last, and each one's successor, IGNORED where it is the context's; both [T]."""
        tokens = torch.from_numpy(self.rows[row].astype(np.int64))
        targets = tokens[1:].clone()
        targets[: self.contexts[row] - 1] = IGNORED
        return tokens[:-1], targets

    def figures(self, log_likelihoods: Sequence[float]) -> dict[str, float]:
        """Return by the log-likelihood of each row: the part of the questions whose answer is the likeliest choice, as
        it is, per character and per byte of the choice, where of two alike the first one counts; and the bits per byte
        of the answers, their mean over the questions."""
        sums, start = np.zeros(len(FIGURES)), 0
        for question in self.questions:
            stop, answer = start + len(question.choices), question.answer
            found = np.array(log_likelihoods[start:stop])
            characters = np.array([len(choice) for choice in question.choices])
            sizes = np.array([len(choice.encode()) for choice in question.choices])
            right = [scores.argmax() == answer for scores in (found, found / characters, found / sizes)]
            sums += [*right, -found[answer] / (sizes[answer] * math.log(2))]
            start = stop
        means = (sums / len(self.questions)).tolist()
        return {f"{self.name}/{name}": value for name, value in zip(FIGURES, means, strict=True)}


FIGURES = ("acc", "acc_norm", "acc_bytes", "bpb")


def load_choices(config: ChoicesConfig, longest: int) -> list[ChoiceTask]:
    """Return the tasks. longest: input that the model takes. Raises DataNotFound or InvalidConfiguration."""
    codec = load_codec(f"{FIELD}.tokenizer", config.tokenizer)
    return [_task(name, Path(path), codec, config.delimiter, longest) for name, path in sorted(config.tasks.items())]


def _task(name: str, path: Path, codec: Codec, delimiter: str, longest: int) -> ChoiceTask:
    questions: list[Question] = []
    rows: list[Tokens] = []
    contexts: list[int] = []
    total = 0
    for question in _read(name, path):
        if len(questions) == MAX_QUESTIONS:
            raise _error(question.place, f"a task has at most {MAX_QUESTIONS} questions: split the file")
        context = question.context.rstrip()
        ends = [question.context[len(context) :] + delimiter + choice for choice in question.choices]
        (start, *found) = codec.encode([context, *(context + end for end in ends)])
        if not len(start):
            start, found = _after_nothing(question.place, found, codec.begin)
        for number, row in enumerate(found):
            if len(row) <= len(start):
                raise _error(
                    question.place,
                    f"`choices[{number}]` adds no token to the context: they share one; end the context earlier",
                )
            if len(row) - 1 > longest:
                raise _error(
                    question.place,
                    f"the context and `choices[{number}]` are {len(row)} tokens, of which the model takes {longest}, "
                    "and one more as the last target: shorten the context",
                )
        total += sum(map(len, found))
        if total > MAX_TOKENS:
            raise _error(question.place, f"the rows up to it have more than {MAX_TOKENS} tokens: split the file")
        questions.append(question)
        rows += found
        contexts += [len(start)] * len(found)
    if not questions:
        raise DataNotFound(f"`{FIELD}.tasks.{name}`: {path} has no question")
    return ChoiceTask(name, questions, rows, contexts)


def _after_nothing(place: str, rows: list[Tokens], begin: int | None) -> tuple[Tokens, list[Tokens]]:
    """Return the tokens of a context that has none of its own, and its rows with them."""
    if begin is None:
        raise _error(
            place,
            "`context` has no token, and without a tokenizer's `bos_token` or `eos_token` none stands for it: give a "
            "text that is not empty",
        )
    start = np.array([begin], np.int32)
    return start, [row if row[:1].tolist() == [begin] else np.concatenate((start, row)) for row in rows]


def _read(name: str, path: Path) -> Iterator[Question]:
    try:
        for number, line in numbered_lines(path, MAX_LINE_BYTES):
            place = f"`{FIELD}.tasks.{name}`: {path}: line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise _error(place, f"it has more than {MAX_LINE_BYTES} bytes")
            yield _question(place, line)
    except OSError as error:
        raise DataNotFound(f"`{FIELD}.tasks.{name}`: {path} cannot be read: {error.strerror or error}") from error


def _question(place: str, line: bytes) -> Question:
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise _error(place, f"it is no JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise _error(place, "it is no object with `context`, `choices` and `answer`")
    context, choices, answer = (value.get(field) for field in ("context", "choices", "answer"))
    if not isinstance(context, str):
        raise _error(place, "`context` must be a text")
    if not isinstance(choices, list) or not 2 <= len(choices) <= MAX_CHOICES or not all(map(_is_choice, choices)):
        raise _error(place, f"`choices` must be a list of 2 to {MAX_CHOICES} texts that are not empty")
    if isinstance(answer, bool) or not isinstance(answer, int) or not 0 <= answer < len(choices):
        raise _error(place, f"`answer` must be the index of a choice, 0 to {len(choices) - 1}")
    return Question(context, choices, answer, place)


def _is_choice(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _error(place: str, why: str) -> DataNotFound:
    return DataNotFound(f"{place}: {why}")
