"""Manifests by chance: a right job, with some fields taken from the CRD's schema, some of them just beyond it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.integration.operator_process import CRD, a_spec

Raw = dict[str, Any]
Path = tuple[str, ...]

_DEPTH = 3
"""How deep generated values are filled in."""
_FEW = 3
"""The most pods of a role and the most entries of a list: the size of a job is not what is tested here."""
TRAINING: Raw = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "steps": 10, "microBatchSize": 4}


def spec_schema() -> Raw:
    """Schema of `spec`."""
    definition = yaml.safe_load(CRD.read_text())
    schema: Raw = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def paths(schema: Raw, path: Path = ()) -> Iterator[tuple[Path, Raw]]:
    """Every field of the schema that no list is passed on the way to, and its schema."""
    for name, below in schema.get("properties", {}).items():
        yield (*path, name), below
        yield from paths(below, (*path, name))


def value(schema: Raw, depth: int = _DEPTH) -> st.SearchStrategy[Any]:
    """Mostly what the schema allows; now and then what it does not."""
    return st.integers(0, 9).flatmap(lambda dice: wrong(schema) if dice == 0 else right(schema, depth))


def wrong(schema: Raw) -> st.SearchStrategy[Any]:
    """Values of another type than the schema's, or just beyond a bound."""
    beyond: list[Any] = [None, "", -1, 0, 2**31, 1.5, True, "no such word", [], [{}], {}, {"noSuchField": 1}]
    if "maximum" in schema:
        beyond.append(schema["maximum"] + 1)
    if "minimum" in schema:
        beyond.append(schema["minimum"] - 1)
    if "maxLength" in schema:
        beyond.append("x" * (schema["maxLength"] + 1))
    return st.sampled_from(beyond).map(copy.deepcopy)


def right(schema: Raw, depth: int) -> st.SearchStrategy[Any]:
    """What the schema of one field allows, as far as it is known without its patterns and rules."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from([1, "1", "50%", "100m", "1Gi"])
    match schema.get("type"):
        case "boolean":
            return st.booleans()
        case "integer":
            return _integers(schema)
        case "number":
            return st.sampled_from([0, 0.1, 0.5, 1, 1.0, 3e-4, 10])
        case "string":
            return _strings(schema)
        case "array":
            most = min(schema.get("maxItems", _FEW), _FEW) if depth > 0 else 0
            least = min(schema.get("minItems", 0), most)
            return st.lists(value(schema.get("items", {}), depth - 1), min_size=least, max_size=most)
        case "object":
            return _objects(schema, depth)
    return st.sampled_from([1, "a word", {"a": 1}])


def _integers(schema: Raw) -> st.SearchStrategy[int]:
    lowest, highest = schema.get("minimum", 0), schema.get("maximum", 2**31 - 1)
    return st.one_of(st.integers(lowest, min(lowest + _FEW, highest)), st.integers(lowest, highest))


def _strings(schema: Raw) -> st.SearchStrategy[str]:
    candidates = [
        "a",
        "trainer",
        "disttrain.io/job-name",
        "10m",
        "mine:build",
        "/a/path",
        "True",
        "x y",
        "ß",
        "$(RANK)",
        "A_B",
    ]
    least, most = schema.get("minLength", 0), schema.get("maxLength", 10**6)
    return st.sampled_from([word for word in candidates if least <= len(word) <= most] or ["x" * least])


def _objects(schema: Raw, depth: int) -> st.SearchStrategy[Raw]:
    properties: Raw = schema.get("properties", {})
    required = {name: value(properties[name], depth - 1) for name in schema.get("required", ())}
    if depth <= 0:
        return st.fixed_dictionaries(required)
    optional = {name: value(below, depth - 1) for name, below in properties.items() if name not in required}
    if optional:
        # A few of many fields at a time.
        chosen = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
        return chosen.flatmap(lambda names: st.fixed_dictionaries(required | {name: optional[name] for name in names}))
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        return st.dictionaries(
            st.sampled_from(["mine", "disttrain.io/role", "a"]), value(others, depth - 1), max_size=2
        )
    return st.fixed_dictionaries(required) if required else st.sampled_from([{}, {"hidden": 8}])


def specs() -> st.SearchStrategy[Raw]:
    """Specs of jobs."""
    fields = list(paths(spec_schema()))
    own = [field for field in fields if "template" not in field[0][:-1]]
    # Most of the schema is Kubernetes' own; most of what can go wrong is ours.
    field = st.one_of(st.sampled_from(own), st.sampled_from(own), st.sampled_from(fields))
    change = field.flatmap(lambda chosen: st.tuples(st.just(chosen[0]), value(chosen[1])))
    bases = st.sampled_from([a_spec(), {"workers": {"replicas": 2}, "training": TRAINING}])
    return st.builds(changed, bases, st.lists(change, max_size=4))


def changed(base: Raw, changes: Sequence[tuple[Path, Any]]) -> Raw:
    """The spec with some fields set."""
    spec = copy.deepcopy(base)
    for path, new in changes:
        place: Any = spec
        for part in path[:-1]:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[path[-1]] = new
    for role in ("workers", "parameterServers"):
        replicas = spec[role].get("replicas") if isinstance(spec.get(role), dict) else None
        if isinstance(replicas, int) and _FEW < replicas <= 10_000:
            spec[role]["replicas"] = _FEW
    return spec
