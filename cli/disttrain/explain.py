"""`disttrain explain FIELD`: what a field of a DistTrainingJob means, from the schema that the API server has."""

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from disttrain.errors import USAGE, CommandError
from disttrain_api.builtin import DATA_CONFIGS, MODEL_CONFIGS
from disttrain_api.crd import model_schema
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_api.structural import did_you_mean

Schema = dict[str, Any]

_OPAQUE = ("template", "volumeClaimTemplate", "env", "envFrom", "resources")
"""Fields that are Kubernetes' own: `kubectl explain pod` has them."""
_CONFIGS: dict[str, dict[str, Any]] = {
    "spec.training.model.config": MODEL_CONFIGS,
    "spec.training.data.config": DATA_CONFIGS,
}


def explain(field: str | None) -> str:
    """Return what stands in docs/reference.md on the field, with the fields in it. Raises CommandError.

    field: a path such as spec.training.steps; `spec.` may be left out. None: the whole.
    """
    whole = {"properties": {"spec": model_schema(JobSpec, "spec"), "status": model_schema(JobStatus, "status")}}
    path = [part.removesuffix("[]") for part in (field or "").removeprefix("dtj.").split(".") if part]
    if path and path[0] not in whole["properties"]:
        path = ["spec", *path]
    schema: Schema = whole
    for at, part in enumerate(path):
        known = _inside(schema, path[:at])
        if part not in known:
            raise CommandError(_unknown(path, at, known), USAGE)
        schema = known[part] | {"required_here": part in schema.get("items", schema).get("required", [])}
    return "\n".join(_page(".".join(path), schema))


def _unknown(path: list[str], at: int, known: dict[str, Schema]) -> str:
    where = ".".join(path[:at]) or "the job"
    if not known:
        return f"{where} has no fields of its own" + (
            "; `kubectl explain pod` has these" if path[at - 1] in _OPAQUE else ""
        )
    meant = did_you_mean(path[at], list(known))
    rest = f"; did you mean `{meant}`?" if meant else ": it has " + ", ".join(known)
    return f"{where} has no field '{path[at]}'{rest}"


def _inside(schema: Schema, path: list[str]) -> dict[str, Schema]:
    if path and path[-1] in _OPAQUE:
        return {}
    fields: dict[str, Schema] = schema.get("items", schema).get("properties", {})
    return fields


def _page(path: str, schema: Schema) -> Iterator[str]:
    fields = _inside(schema, path.split("."))
    if path:
        yield f"{path} <{_type(schema)}>{_notes(schema)}"
        yield from _wrapped(schema.get("description") or schema.get("items", {}).get("description", ""), "  ")
    if fields:
        yield ""
        yield "FIELDS"
        for name, field in fields.items():
            required = name in schema.get("items", schema).get("required", [])
            yield f"  {name} <{_type(field)}>{_notes(field | {'required_here': required})}"
            yield from _wrapped(field.get("description", ""), "      ")
    for name, config in _CONFIGS.get(path, {}).items():
        yield ""
        yield f"FIELDS for name: {name}"
        for key, field in model_schema(config, "config")["properties"].items():
            yield f"  {key} <{_type(field)}>{_notes(field)}"
            yield from _wrapped(field.get("description", ""), "      ")


def _type(schema: Schema) -> str:
    if "items" in schema:
        return f"list of {_type(schema['items'])}"
    if "enum" in schema:
        return " | ".join(str(word) for word in schema["enum"])
    return "time" if schema.get("format") == "date-time" else str(schema.get("type", "any"))


def _notes(schema: Schema) -> str:
    notes = ["required"] if schema.get("required_here") else []
    if "default" in schema and not isinstance(schema["default"], dict):
        value = schema["default"]
        notes.append(f"default {value if isinstance(value, str) else json.dumps(value)}")
    low = (">" if schema.get("exclusiveMinimum") else "≥", schema.get("minimum"))
    high = ("<" if schema.get("exclusiveMaximum") else "≤", schema.get("maximum"))
    notes += [f"{sign} {bound}" for sign, bound in (low, high) if bound is not None]
    return f"  ({', '.join(notes)})" if notes else ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent)
