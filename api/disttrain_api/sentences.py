"""pydantic's errors as plain sentences about the manifest."""

import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from disttrain_api.structural import describe, did_you_mean, shorten, unknown_field
from disttrain_api.violation import Location, Violation

_Sentence = Callable[[dict[str, Any], Any], str]

MISSING = "must be given"
MAX_PROBLEMS = 100
"""The most problems that are reported at once. The next ones are found when these are mended."""

# By pydantic's error type; the arguments are the error's context and the value found.
_SENTENCES: dict[str, _Sentence] = {
    "missing": lambda context, found: MISSING,
    "int_type": lambda context, found: f"must be an integer, not {describe(found)}",
    "float_type": lambda context, found: f"must be a number, not {describe(found)}",
    "bool_type": lambda context, found: f"must be true or false, not {describe(found)}",
    "string_type": lambda context, found: f"must be a string, not {describe(found)}",
    "list_type": lambda context, found: f"must be a list, not {describe(found)}",
    "dict_type": lambda context, found: f"must be an object with keys and values, not {describe(found)}",
    "model_type": lambda context, found: f"must be an object with keys and values, not {describe(found)}",
    "greater_than": lambda context, found: f"must be greater than {context['gt']:g}, not {found}",
    "greater_than_equal": lambda context, found: f"must be greater than or equal to {context['ge']}, not {found}",
    "less_than": lambda context, found: f"must be less than {context['lt']:g}, not {found}",
    "less_than_equal": lambda context, found: f"must be less than or equal to {context['le']}, not {found}",
    "finite_number": lambda context, found: "must be a finite number",
    "int_parsing_size": lambda context, found: "is too large for an integer",
    "too_short": lambda context, found: f"must have at least {_items(context['min_length'])}",
    "too_long": lambda context, found: f"must have at most {_items(context['max_length'])}, not {len(found)}",
    "string_too_short": lambda context, found: "may not be empty",
    "string_too_long": lambda context, found: (
        f"must have at most {context['max_length']} characters, not {len(str(found))}"
    ),
    "string_pattern_mismatch": lambda context, found: f"'{shorten(str(found))}' must match {context['pattern']}",
    "enum": lambda context, found: f"must be one of {', '.join(_expected(context))}, not {describe(found)}",
    "literal_error": lambda context, found: f"must be {context['expected']}, not {describe(found)}",
    "json_type": lambda context, found: "must be plain YAML: objects, lists, strings, numbers, true, false",
}


def _items(count: int) -> str:
    return f"{count} item" + ("s" if count != 1 else "")


def violations(error: ValidationError, model: type[BaseModel]) -> list[Violation]:
    """One sentence for each of the first errors; `model` is the one that was validated."""
    return [_violation(details, model) for details in error.errors(include_url=False)[:MAX_PROBLEMS]]


def _violation(details: ErrorDetails, model: type[BaseModel]) -> Violation:
    location: Location = details["loc"]
    found = details.get("input")
    if details["type"] == "extra_forbidden":
        return unknown_field(location, _known_fields(model, location[:-1]), found)
    sentence = _SENTENCES.get(details["type"])
    context: dict[str, Any] = dict(details.get("ctx") or {})
    message = sentence(context, found) if sentence else details["msg"][:1].lower() + details["msg"][1:]
    missing = details["type"] == "missing"
    return Violation(location, message, None if missing else found, _hint(details["type"], context, found))


def _hint(kind: str, context: dict[str, Any], found: Any) -> str | None:
    if kind == "enum" and isinstance(found, str):
        guess = did_you_mean(found, [word.strip("'") for word in _expected(context)])
        return f"did you mean '{guess}'?" if guess else None
    if kind in ("int_type", "float_type") and isinstance(found, str) and _is_number(found):
        return "write it without quotes"
    if kind == "string_type" and isinstance(found, bool | int | float):
        return "write it in quotes"
    return None


def _expected(context: dict[str, Any]) -> list[str]:
    """The words of an enumeration, each in quotes."""
    words: list[str] = context["expected"].replace(" or ", ", ").split(", ")
    return words


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _known_fields(model: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """The fields of the object at `location`."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            return []
        if isinstance(part, int):
            continue  # an item is of the model that its list is of
        fields = {field.alias or name: field for name, field in current.model_fields.items()}
        field = fields.get(str(part))
        current = _model_in(field.annotation) if field else None
    return [field.alias or name for name, field in current.model_fields.items()] if current else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a field that is a model, a list of them, or one of both or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, typing.Annotated):
        return _model_in(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next((found for found in map(_model_in, typing.get_args(annotation)) if found), None)
    return None
