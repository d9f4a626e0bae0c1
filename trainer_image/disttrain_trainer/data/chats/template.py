"""Tokens of conversations by a tokenizer's chat template, and which of them are the assistant's.

A template is a program that comes with the tokenizer: transformers runs it in Jinja's sandbox. Where it marks what the
assistant says (`{% generation %}`), that counts. Where it does not, the assistant's part of a message is what the
template adds for it to the prompt of the messages before; a template for which this is not exact is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disttrain_trainer.data.chats.lines import ASSISTANT, CALLS, REASONING, TOOLS, Conversation, Message
from disttrain_trainer.data.tokenizer import load_tokenizer
from disttrain_trainer.runtime.errors import DataNotFound, InvalidConfiguration, one_line, shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FIELD = "`training.data.config.tokenizer`"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CLOCK = "strftime_now"

Span = tuple[int, int]
"""Characters of a text: the first, and the one after the last."""
Tokens = tuple[NDArray[np.int32], NDArray[np.bool_]]
"""The tokens of a conversation, and which of them are the assistant's."""


class ChatTokenizer:
    """A tokenizer with a chat template."""

    def __init__(self, folder: Path, arguments: Mapping[str, Any]) -> None:
        """arguments: variables of the template. Raises InvalidConfiguration or DataNotFound."""
        self._folder, self._arguments = folder, dict(arguments)
        self._tokenizer = load_tokenizer(_FIELD.strip("`"), folder)
        self._template = _template_of(self._tokenizer, folder)
        self._marks = _MARKED.search(self._template) is not None
        special = sorted(token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self._require_arguments()

    def encode(self, conversations: Sequence[Conversation]) -> Iterator[Tokens]:
        """Yield the tokens of each. Raises InvalidConfiguration or DataNotFound naming the conversation."""
        texts, spans = zip(*map(self._rendered, conversations), strict=True)
        try:
            found = self._tokenizer(
                list(texts),
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            )
        except Exception as error:
            raise InvalidConfiguration(
                f"{_FIELD}: the tokenizer in {self._folder} cannot tokenise {conversations[0].place} and those after "
                f"it: {type(error).__name__}: {one_line(error):.300}"
            ) from error
        for number, conversation in enumerate(conversations):
            offsets = np.array(found["offset_mapping"][number], np.int64).reshape(-1, 2)
            counted = _inside(offsets, spans[number])
            if counted is None:
                raise DataNotFound(
                    f"`training.data.config.path`: {conversation.place}: a token holds characters of a message of the "
                    f"role {ASSISTANT} and of what the chat template writes beside it, so that its loss is of both: "
                    "remove white space at the ends of the message"
                )
            yield np.array(found["input_ids"][number], np.int32), counted

    def _rendered(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and the assistant's parts of it."""
        self._require_no_special(conversation)
        self._require_read(conversation)
        if self._marks:
            return self._marked(conversation)
        whole = self._applied(conversation, conversation.messages)
        return whole, [
            self._added(conversation, number, whole)
            for number, message in enumerate(conversation.messages)
            if message["role"] == ASSISTANT
        ]

    def _require_no_special(self, conversation: Conversation) -> None:
        given = [(f"the content of message {at}", message) for at, message in enumerate(conversation.messages)]
        for what, value in [*given, (f"`{TOOLS}`", conversation.tools)]:
            for text in _texts(value):
                if found := self._special.search(text):
                    raise DataNotFound(
                        f"`training.data.config.path`: {conversation.place}: {what} has '{shown(found[0]):.60}', a "
                        "special token, with which the chat template divides messages: remove it"
                    )

    def _require_read(self, conversation: Conversation) -> None:
        """A template leaves out what it does not read, without a word."""
        used = {name for message in conversation.messages for name in (CALLS, REASONING) if name in message}
        advice = dict.fromkeys((TOOLS, CALLS), "a model that calls tools") | {REASONING: "a model that reasons"}
        for name in sorted(used | ({TOOLS} if conversation.tools else set())):
            if not self._reads(name):
                raise InvalidConfiguration(
                    f"{_FIELD}: the chat template of {self._folder} does not read `{name}`, which {conversation.place} "
                    f"has: take the template of {advice[name]}, or remove them"
                )

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self._template) is not None

    def _added(self, conversation: Conversation, number: int, whole: str) -> Span:
        """Return what the template adds for a message of the assistant to the prompt of the messages before it."""
        messages = conversation.messages
        if number == 0:
            raise DataNotFound(
                f"`training.data.config.path`: {conversation.place}: its first message is of the role {ASSISTANT}, "
                "which answers none; remove it, or mark the assistant's part in the chat template with "
                "{% generation %} and {% endgeneration %}"
            )
        before = self._applied(conversation, messages[:number], add_generation_prompt=True)
        after = self._applied(conversation, messages[: number + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise InvalidConfiguration(
                f"{_FIELD}: the chat template of {self._folder} does not tell which part of message {number} of "
                f"{conversation.place} is the {ASSISTANT}'s: for the messages up to it, it writes another text than "
                "for all; mark that part in the template with {% generation %} and {% endgeneration %}, or split "
                "conversations so that each ends with its only answer"
            )
        return len(before), len(after)

    def _applied(self, conversation: Conversation, messages: list[Message], **options: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools or None,  # type: ignore[arg-type] # their descriptions, no functions
                tokenize=False,
                **options,
                **self._arguments,
            )
        except Exception as error:
            raise self._failed(conversation, error) from error
        assert isinstance(text, str)
        return text

    def _marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # What `apply_chat_template` calls, which returns tokens alone.
            rendered: Any = render_jinja_template(
                conversations=[conversation.messages],
                tools=conversation.tools or None,  # type: ignore[arg-type] # their descriptions, no functions
                chat_template=self._template,
                return_assistant_tokens_mask=True,
                **{**self._tokenizer.special_tokens_map, **self._arguments},
            )
        except Exception as error:
            raise self._failed(conversation, error) from error
        (text,), (spans,) = rendered
        return text, spans

    def _failed(self, conversation: Conversation, error: Exception) -> InvalidConfiguration:
        return InvalidConfiguration(
            f"{_FIELD}: the chat template of {self._folder} cannot be applied to {conversation.place}: "
            f"{type(error).__name__}: {one_line(error):.300}"
        )

    def _require_arguments(self) -> None:
        field = "`training.data.config.templateArguments`"
        taken = {"messages", *signature(self._tokenizer.apply_chat_template).parameters}
        for name in self._arguments:
            if name in taken:
                raise InvalidConfiguration(f"{field}.{name} is not the template's but set by the trainer: remove it")
            # The template ignores what it does not read, without a word.
            if not self._reads(name):
                raise InvalidConfiguration(
                    f"{field}: the chat template of {self._folder} does not read `{shown(name):.60}`: remove it"
                )
        if _CLOCK in self._template and not self._arguments:
            raise InvalidConfiguration(
                f"{field}: the chat template of {self._folder} writes the present date ({_CLOCK}), so that a job that "
                "resumes on another day would train on other tokens: set the variable that it reads in place of it, "
                "such as `date_string`"
            )


def _texts(value: object) -> Iterator[str]:
    """Yield all texts within a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in (*value, *value.values()):
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _template_of(tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    try:
        found: object = tokenizer.get_chat_template()
    except ValueError:
        found = None
    if not isinstance(found, str):
        raise InvalidConfiguration(
            f"{_FIELD}: {folder} has no chat template (chat_template.jinja, or `chat_template` in "
            "tokenizer_config.json): take that of the model's chat version"
        )
    return found


def _inside(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_] | None:
    """Return which tokens lie in one of the spans; None where one lies on the edge of a span.

    offsets: first character of each token, and the one after the last. White space that a token begins with may be
    left out of them: it is what lies between it and the token before.
    """
    starts, ends = offsets.T
    reached = np.maximum.accumulate(np.concatenate([[0], ends]))[:-1]
    starts = np.minimum(starts, reached)
    counted = np.zeros(len(offsets), np.bool_)
    for begin, end in spans:
        for edge in (begin, end):
            if ((starts < edge) & (edge < ends)).any():
                return None
        counted |= (begin <= starts) & (ends <= end) & (begin < end)
    return counted
