"""Conversations of JSON Lines files, each checked when it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from disttrain_trainer.runtime.errors import DataNotFound, shown
from disttrain_trainer.runtime.files import numbered_lines

MAX_LINE_BYTES = 2**24
"""The longest line: it is held in memory as a whole, and so are its tokens."""
MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "assistant"
CALLS, REASONING, TOOLS = "tool_calls", "reasoning_content", "tools"
SUFFIXES = (".jsonl", ".ndjson")
_FORMS = "an object with `messages`, or with `prompt` and `completion`"

Message = dict[str, Any]
"""`role` and `content`; of the assistant also `tool_calls` and `reasoning_content`, of a tool `name` and
`tool_call_id`."""
_FIELDS = {ASSISTANT: (CALLS, REASONING), "tool": ("name", "tool_call_id")}
"""What messages of a role may have besides."""
_CALL = "an object with `function`, that has `name` and `arguments`, and perhaps `id` and `type`"


@dataclass(frozen=True)
class Conversation:
    """Messages, of which one at least is the assistant's."""

    place: str
    """File and line."""
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    """What the assistant may call, as the template gets it."""


def read_conversations(path: Path) -> Iterator[Conversation]:
    """Yield the conversations of a file, or of all files of a folder, in an order that does not depend on the file
    system. Raises DataNotFound naming file, line and field.
    """
    for file in _files(path):
        try:
            for number, line in numbered_lines(file, MAX_LINE_BYTES):
                place = f"{file}: line {number}"
                if len(line) > MAX_LINE_BYTES:
                    raise _error(place, f"it has more than {MAX_LINE_BYTES} bytes; split the conversation")
                yield _conversation(place, line)
        except OSError as error:
            raise DataNotFound(
                f"`training.data.config.path`: {file} cannot be read: {error.strerror or error}"
            ) from error


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataNotFound(f"`training.data.config.path`: {path} does not exist (from {Path.cwd()})")
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    if not found:
        raise DataNotFound(f"`training.data.config.path`: {path} has no file that ends with {' or '.join(SUFFIXES)}")
    return found


def _conversation(place: str, line: bytes) -> Conversation:
    try:
        value = from_json(line, allow_inf_nan=False)
    except ValueError as error:
        raise _error(place, f"it is no JSON: {shown(str(error))}") from error
    if not isinstance(value, dict):
        raise _error(place, f"it is {_kind(value)}, expected {_FORMS}")
    if "messages" in value:
        messages = _of_list(place, value)
    elif "prompt" in value and "completion" in value:
        messages = [
            {"role": role, "content": _text(place, f"`{name}`", value[name])}
            for name, role in (("prompt", "user"), ("completion", ASSISTANT))
        ]
    else:
        names = ", ".join(sorted(map(shown, value))[:10]) or "nothing"
        raise _error(place, f"it has {names:.300}, expected {_FORMS}")
    spoken = [message for message in messages if message["role"] == ASSISTANT]
    if not spoken:
        raise _error(place, f"it has no message of the role {ASSISTANT}, which is what is learnt: remove the line")
    if not all(CALLS in message or message["content"].strip() for message in spoken):
        raise _error(place, f"a message of the role {ASSISTANT} has no text: remove it, or the line")
    return Conversation(place, messages, _tools(place, value.get(TOOLS)))


def _tools(place: str, found: Any) -> list[dict[str, Any]]:
    if found is not None and (not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found)):
        raise _error(place, f"`{TOOLS}` is no list of objects, expected the description of a function in each")
    return found or []


def _of_list(place: str, value: Mapping[str, Any]) -> list[Message]:
    if "prompt" in value or "completion" in value:
        raise _error(place, f"it has `messages` beside `prompt` or `completion`, expected {_FORMS}")
    found = value["messages"]
    if not isinstance(found, list):
        raise _error(place, f"`messages` is {_kind(found)}, expected a list of objects with `role` and `content`")
    if not 1 <= len(found) <= MAX_MESSAGES:
        raise _error(place, f"`messages` has {len(found)} messages, expected 1 to {MAX_MESSAGES}: remove the line")
    return [_message(place, f"messages[{number}]", message) for number, message in enumerate(found)]


def _message(place: str, field: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise _error(place, f"`{field}` is {_kind(value)}, expected an object with `role` and `content`")
    # Tables of unlike messages have a null for what a message has not.
    value = {name: part for name, part in value.items() if part is not None or name == "content"}
    calls = value.get(CALLS) is not None
    for name in ("role",) if calls else ("role", "content"):
        if name not in value:
            raise _error(place, f"`{field}` has no `{name}`, expected an object with `role` and `content`")
    if (role := value["role"]) not in ROLES:
        found = f"'{shown(role):.60}'" if isinstance(role, str) else _kind(role)
        raise _error(place, f"`{field}.role` is {found}, expected one of {', '.join(ROLES)}")
    content = "" if calls and value.get("content") is None else _text(place, f"`{field}.content`", value["content"])
    message: Message = {"role": role, "content": content}
    for name, part in value.items():
        if name in message:
            continue
        if name not in _FIELDS.get(role, ()):
            raise _error(
                place,
                f"`{field}.{shown(name):.60}` is not supported for the role {role}: remove it, or write it as text",
            )
        own = f"{field}.{name}"
        message[name] = _calls(place, own, part) if name == CALLS else _text(place, f"`{own}`", part)
    return message


def _calls(place: str, field: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        found = "empty" if value == [] else _kind(value)
        raise _error(place, f"`{field}` is {found}, expected a list of calls")
    return [_call(place, f"{field}[{number}]", call) for number, call in enumerate(value)]


def _call(place: str, field: str, value: Any) -> dict[str, Any]:
    """Return a call as templates read it: its arguments are an object, which OpenAI's form writes as a text."""
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.keys() - {"function", "id", "type"}:
        raise _error(place, f"`{field}` is not {_CALL}")
    if not isinstance(function.get("name"), str) or function.keys() != {"name", "arguments"}:
        raise _error(place, f"`{field}.function` is not an object with `name`, a text, and `arguments`")
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = from_json(arguments, allow_inf_nan=False)
        except ValueError as error:
            raise _error(place, f"`{field}.function.arguments` is no JSON: {shown(str(error))}") from error
    if not isinstance(arguments, dict):
        raise _error(place, f"`{field}.function.arguments` is {_kind(arguments)}, expected an object")
    return value | {"function": {"name": function["name"], "arguments": arguments}}


def _text(place: str, field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _error(place, f"{field} is {_kind(value)}, expected a text")
    return value


def _kind(value: Any) -> str:
    named = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return named.get(type(value), "a number")


def _error(place: str, why: str) -> DataNotFound:
    return DataNotFound(f"`training.data.config.path`: {place}: {why}")
