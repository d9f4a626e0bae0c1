"""Whether an answer is as docs/agent-api.json says: its code, and its body by the JSON schema of that code."""

import json
from collections.abc import Iterator
from typing import Any

from tools.cluster.paths import REPOSITORY

Schema = dict[str, Any]

DOCUMENT: Schema = json.loads((REPOSITORY / "docs" / "agent-api.json").read_text())
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": int | float}
_BOUNDS = {
    "minimum": lambda value, bound: value >= bound,
    "maximum": lambda value, bound: value <= bound,
    "minLength": lambda value, bound: len(value) >= bound,
    "maxLength": lambda value, bound: len(value) <= bound,
    "minItems": lambda value, bound: len(value) >= bound,
    "maxItems": lambda value, bound: len(value) <= bound,
    "maxProperties": lambda value, bound: len(value) <= bound,
    "const": lambda value, constant: value == constant,
    "enum": lambda value, words: value in words,
}
_INNER = {"$ref", "type", "properties", "required", "additionalProperties", "items", "title", "description"}


def assert_described(path: str, method: str, code: int, answer: Any) -> None:
    """Fails where the document says anything else of an answer to a request for `path`. One that it does not have, by
    path and method, is a refusal."""
    described = DOCUMENT["paths"].get(path.partition("?")[0], {}).get(method.lower())
    responses = DOCUMENT["components"]["responses"] if described is None else described["responses"]
    assert str(code) in responses, f"{method} {path} is answered {code}, and only {', '.join(responses)} are described"
    schema = _resolved(responses[str(code)])["content"]["application/json"]["schema"]
    problems = list(_problems(schema, answer, "answer"))
    assert not problems, "; ".join(problems)


def _resolved(node: Schema) -> Schema:
    if "$ref" not in node:
        return node
    found: Any = DOCUMENT
    for part in node["$ref"].removeprefix("#/").split("/"):
        found = found[part]
    return _resolved(found) | {key: value for key, value in node.items() if key != "$ref"}


def _problems(schema: Schema, value: Any, at: str) -> Iterator[str]:
    schema = _resolved(schema)
    assert set(schema) <= _INNER | set(_BOUNDS), f"{at}: a keyword that this module does not know: {set(schema)}"
    kind = _TYPES[schema["type"]]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        yield f"{at}: {value!r} is no {schema['type']}"
        return
    for keyword, holds in _BOUNDS.items():
        if keyword in schema and not holds(value, schema[keyword]):
            yield f"{at}: {keyword} is {schema[keyword]}, not so {value!r}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _problems(schema["items"], item, f"{at}[{number}]")
    if isinstance(value, dict):
        yield from (f"{at}.{name} is absent" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if inner is None:
                yield f"{at}.{name} is not described"
            else:
                yield from _problems(inner, item, f"{at}.{name}")
