"""Plain JSON against a structural schema, the way the API server does it: for pod templates, which have no model."""

import difflib
import re
from collections.abc import Iterable, Iterator
from typing import Any

from disttrain_api.escape import escaped
from disttrain_api.violation import Location, Violation

Schema = dict[str, Any]

UNKNOWN_FIELD = "unknown field"
# Nobody misspells a field like this; and a search costs time in proportion to the length.
_MAX_GUESSED = 64
_MAX_LISTED = 32
NO_VALUE = "has no value: set one, or remove the key"

_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_WORDS = {
    "object": "an object with keys and values",
    "array": "a list",
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
}


def check(value: Any, schema: Schema, location: Location) -> Iterator[Violation]:
    """Everything about `value` that the API server would refuse, and keys without a value, which it drops."""
    if value is None:
        yield Violation(location, NO_VALUE)
        return
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            hint = "write it in quotes" if isinstance(value, float) else None
            yield Violation(location, f"must be an integer or a string, not {describe(value)}", value, hint)
            return
    else:
        wanted = schema["type"]
        # Python's booleans are integers, JSON's are not.
        if not isinstance(value, _PYTHON_TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean"):
            yield Violation(location, f"must be {_WORDS[wanted]}, not {describe(value)}", value)
            return
    if isinstance(value, dict):
        yield from _check_object(value, schema, location)
    elif isinstance(value, list):
        yield from _check_list(value, schema, location)
    elif isinstance(value, str):
        yield from _check_string(value, schema, location)


def with_defaults(value: Any, schema: Schema) -> Any:
    """A copy of `value` with the schema's defaults filled in, as the API server stores it."""
    if isinstance(value, dict):
        filled = dict(value)
        for key, field in schema.get("properties", {}).items():
            if key not in filled and "default" in field:
                filled[key] = field["default"]
        return {key: with_defaults(item, _field_schema(schema, key)) for key, item in filled.items()}
    if isinstance(value, list):
        return [with_defaults(item, schema.get("items", {})) for item in value]
    return value


def describe(value: Any) -> str:
    """A value of a manifest in words."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string '{shorten(value)}'"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object with keys and values"
    return f"the number {value}"


def shorten(text: str, length: int = 80) -> str:
    """Text for a message: at most `length` characters, on one line, with escapes for what is no text."""
    line = escaped(" ".join(text.split())[: length + 1])
    return line if len(line) <= length else f"{line[: length - 1]}…"


def did_you_mean(key: str, known: Iterable[str]) -> str | None:
    """The known word that `key` is most likely a misspelling of."""
    if len(key) > _MAX_GUESSED:
        return None
    by_lower = {word.lower(): word for word in known}
    plain = key.replace("_", "").replace("-", "").lower()
    matches = difflib.get_close_matches(plain, by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def unknown_field(location: Location, known: Iterable[str], found: Any = None) -> Violation:
    """The violation for a key that does not exist."""
    known = sorted(known)
    guess = did_you_mean(str(location[-1]), known)
    hint = f"did you mean `{guess}`?" if guess else None
    if hint is None and 0 < len(known) <= _MAX_LISTED:
        hint = f"known here: {', '.join(f'`{name}`' for name in known)}"
    return Violation(location, UNKNOWN_FIELD, found, hint, meant=guess)


def _field_schema(schema: Schema, key: str) -> Schema:
    found: Schema = schema.get("properties", {}).get(key) or schema.get("additionalProperties") or {}
    return found


def _check_object(value: dict[str, Any], schema: Schema, location: Location) -> Iterator[Violation]:
    properties, additional = schema.get("properties"), schema.get("additionalProperties")
    most = schema.get("maxProperties")
    if most is not None and len(value) > most:
        yield Violation(location, f"must have at most {most} entries, not {len(value)}")
    for key in schema.get("required", []):
        if key not in value:
            yield Violation((*location, key), "must be given")
    for key, item in value.items():
        if properties is not None and key in properties:
            yield from check(item, properties[key], (*location, key))
        elif additional is not None:
            yield from check(item, additional, (*location, key))
        else:
            yield unknown_field((*location, key), properties or (), item)


def _check_list(value: list[Any], schema: Schema, location: Location) -> Iterator[Violation]:
    most = schema.get("maxItems")
    if most is not None and len(value) > most:
        yield Violation(location, f"must have at most {most} items, not {len(value)}")
    seen: dict[tuple[Any, ...], int] = {}
    keys = schema.get("x-kubernetes-list-map-keys", [])
    for index, item in enumerate(value):
        yield from check(item, schema["items"], (*location, index))
        if keys and isinstance(item, dict):
            identity = tuple(str(with_defaults(item, schema["items"]).get(key)) for key in keys)
            if identity in seen:
                named = ", ".join(f"{key} '{shorten(word)}'" for key, word in zip(keys, identity, strict=True))
                yield Violation((*location, index), f"{named} is already in [{seen[identity]}]")
            seen.setdefault(identity, index)


def _check_string(value: str, schema: Schema, location: Location) -> Iterator[Violation]:
    if "enum" in schema and value not in schema["enum"]:
        words = ", ".join(f"'{word}'" for word in schema["enum"])
        yield Violation(location, f"must be one of {words}, not '{shorten(value)}'", value)
    if "maxLength" in schema and len(value) > schema["maxLength"]:
        yield Violation(location, f"must have at most {schema['maxLength']} characters, not {len(value)}", value)
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield Violation(location, f"'{shorten(value)}' is not a quantity such as '500m', '2' or '16Gi'", value)
