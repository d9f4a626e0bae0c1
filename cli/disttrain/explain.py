"""`disttrain explain FIELD`: what a field of a DistTrainingJob means, from the schema that the API server has."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from disttrain.errors import USAGE, CommandError
from disttrain_api import choices, samples
from disttrain_api.builtin import DATA_CONFIGS, MODEL_CONFIGS
from disttrain_api.crd import model_schema
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_api.structural import did_you_mean

Schema = dict[str, Any]

_OPAQUE = ("template", "volumeClaimTemplate", "env", "envFrom", "resources")
"""Fields that are Kubernetes' own: `kubectl explain pod` has them."""
_BEHIND: Mapping[str, Mapping[Any, Any]] = {
    "spec.training.model.config": MODEL_CONFIGS,
    "spec.training.data.config": DATA_CONFIGS,
    f"spec.{choices.FIELD}": {"": choices.ChoicesConfig},
    f"spec.{samples.FIELD}": {"": samples.SamplesConfig},
}
"""Models of fields that the API server's schema leaves open: by the `name` beside the field, "" where there is none."""


def explain(field: str | None) -> str:
    """Return what stands in docs/reference.md on the field, with the fields in it. Raises CommandError.

    field: a path such as spec.training.steps; `spec.` may be left out. None: the whole.
    """
    whole = {"properties": {"spec": model_schema(JobSpec, "spec"), "status": model_schema(JobStatus, "status")}}
    path = [part.removesuffix("[]") for part in (field or "").removeprefix("dtj.").split(".") if part]
    if path and path[0] not in whole["properties"]:
        path = ["spec", *path]
    found: dict[str, Schema] = {"": whole}
    for at, part in enumerate(path):
        objects = _objects(".".join(path[:at]), found)
        known = {name: fields for name, schema in objects.items() if part in (fields := _fields(path[:at], schema))}
        if not known:
            raise CommandError(_unknown(path, at, objects), USAGE)
        found = {name: fields[part] | _required(part, objects[name]) for name, fields in known.items()}
    return "\n".join(_page(".".join(path), found))


def _objects(path: str, found: dict[str, Schema]) -> dict[str, Schema]:
    """Return the schemas that hold the fields below a path: by the `name` of a built-in model or data set, or ""."""
    behind = _BEHIND.get(path)
    return found if behind is None else {name: model_schema(model, "config") for name, model in behind.items()}


def _unknown(path: list[str], at: int, objects: dict[str, Schema]) -> str:
    where = ".".join(path[:at]) or "the job"
    known = list(dict.fromkeys(name for schema in objects.values() for name in _fields(path[:at], schema)))
    if not known:
        return f"{where} has no fields of its own" + (
            "; `kubectl explain pod` has these" if path[at - 1] in _OPAQUE else ""
        )
    meant = did_you_mean(path[at], known)
    rest = f"; did you mean `{meant}`?" if meant else ": it has " + ", ".join(known)
    return f"{where} has no field '{path[at]}'{rest}"


def _fields(path: list[str], schema: Schema) -> dict[str, Schema]:
    if path and path[-1] in _OPAQUE:
        return {}
    fields: dict[str, Schema] = schema.get("items", schema).get("properties", {})
    return fields


def _required(name: str, schema: Schema) -> Schema:
    return {"required_here": name in schema.get("items", schema).get("required", [])}


def _page(path: str, found: dict[str, Schema]) -> Iterator[str]:
    for name, schema in found.items():
        if path:
            yield f"{path} <{_type(schema)}>{_notes(schema)}{_of(name)}"
            yield from _wrapped(schema.get("description") or schema.get("items", {}).get("description", ""), "  ")
    for name, schema in _objects(path, found).items():
        fields = _fields(path.split("."), schema)
        if fields:
            yield ""
            yield f"FIELDS{_of(name)}"
        for key, field in fields.items():
            yield f"  {key} <{_type(field)}>{_notes(field | _required(key, schema))}"
            yield from _wrapped(field.get("description", ""), "      ")


def _of(name: str) -> str:
    return f" for name: {name}" if name else ""


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
        notes.append(f"default {value if isinstance(value, str) and value.strip() else json.dumps(value)}")
    low = (">" if schema.get("exclusiveMinimum") else "≥", schema.get("minimum"))
    high = ("<" if schema.get("exclusiveMaximum") else "≤", schema.get("maximum"))
    notes += [f"{sign} {bound}" for sign, bound in (low, high) if bound is not None]
    return f"  ({', '.join(notes)})" if notes else ""


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent)
