"""Defaults of the pods of all jobs: read from the operator's file, merged under each template.

A template wins: mappings are merged key by key, of lists an entry is left out where the template has one of its name.
"""

import posixpath
import re
from collections.abc import Mapping
from typing import Any

from disttrain_api import yaml12
from disttrain_api.names import CONTAINER
from disttrain_api.structural import unknown_field
from disttrain_api.validate import read_job
from disttrain_api.violation import Location, Violation

TemplateDefaults = Mapping[str, Any]
"""Values by the names of FIELDS."""

MAX_BYTES = 16 * 1024
"""Each pod carries them, and so does what the operator keeps of it."""
_METADATA = ("labels", "annotations")
_CONTAINER = ("env", "volumeMounts")
_MAPPINGS = (*_METADATA, "nodeSelector")
FIELDS = (*_MAPPINGS, *_CONTAINER, "imagePullSecrets", "priorityClassName", "tolerations", "volumes")
_SECRETS_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_IN_TRAINER: Location = ("spec", "workers", "template", "spec", "containers", 0)
_IN_POD: tuple[Location, ...] = (_IN_TRAINER, _IN_TRAINER[:4], (*_IN_TRAINER[:3], "metadata"), _IN_TRAINER[:2])


def read_template_defaults(text: str) -> TemplateDefaults:
    """Return the defaults in a YAML text. Raises ValueError with a sentence for each thing that is wrong."""
    if len(text.encode()) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes, which every pod would carry: leave some of it to templates")
    try:
        documents = yaml12.read(text)
    except yaml12.YamlError as error:
        raise ValueError(f"line {error.line}: {error}" if error.line else str(error)) from None
    if len(documents) != 1 or not isinstance(documents[0].value, dict):
        raise ValueError(f"must be one mapping of {', '.join(sorted(FIELDS))}")
    found: dict[str, Any] = documents[0].value
    problems = [unknown_field((name,), FIELDS, value) for name, value in found.items() if name not in FIELDS]
    problems = problems or _problems(found)
    if problems:
        raise ValueError("\n".join(str(problem) for problem in problems))
    return {name: value for name, value in found.items() if value}


def _problems(found: Mapping[str, Any]) -> list[Violation]:
    """Return their problems as a job's template, and problems that matter only when they are merged under others."""
    template = {
        "metadata": {name: found[name] for name in _METADATA if name in found},
        "spec": {name: found[name] for name in FIELDS if name in found and name not in (*_METADATA, *_CONTAINER)}
        | {"containers": [{"name": CONTAINER, "volumeMounts": found.get("volumeMounts", [])}]},
    }
    workers = {"image": "any", "env": found.get("env", []), "template": template}
    problems = [
        Violation(_below(violation.location), violation.message, violation.found, violation.hint, violation.meant)
        for violation in read_job({"metadata": {"name": "any"}, "spec": {"workers": workers}})[1]
    ]
    if problems:
        return problems
    for index, entry in enumerate(found.get("env") or []):
        if not _SECRETS_KEY.fullmatch(entry["name"]):
            message = "must hold letters, digits, '-', '_' and '.' only: it may become a key of a Secret"
            problems.append(Violation(("env", index, "name"), message, entry["name"]))
    volumes = {volume["name"] for volume in found.get("volumes") or []}
    for index, mount in enumerate(found.get("volumeMounts") or []):
        if mount["name"] not in volumes:
            message = f"no volume of `volumes` is called '{mount['name']}'"
            problems.append(Violation(("volumeMounts", index, "name"), message, mount["name"]))
    return problems


def _below(location: Location) -> Location:
    """The place in the file, of a place in the job that was made of it."""
    above = next((above for above in _IN_POD if location[: len(above)] == above), ())
    return location[len(above) :]


def with_defaults(template: Mapping[str, Any], defaults: TemplateDefaults) -> dict[str, Any]:
    """Return the pod template with the defaults that it does not speak of itself. The template is not changed."""
    if not defaults:
        return dict(template)
    metadata, spec = dict(template.get("metadata") or {}), dict(template.get("spec") or {})
    for name in _MAPPINGS:
        if name in defaults:
            part = metadata if name in _METADATA else spec
            part[name] = {**defaults[name], **(part.get(name) or {})}
    if "priorityClassName" in defaults:
        spec.setdefault("priorityClassName", defaults["priorityClassName"])
    for name, key in (("imagePullSecrets", "name"), ("volumes", "name"), ("tolerations", "key")):
        if name in defaults:
            spec[name] = _appended(spec.get(name), defaults[name], key)
    containers = list(spec.get("containers") or [])
    if CONTAINER not in {container.get("name") for container in containers}:
        containers.append({"name": CONTAINER})
    spec["containers"] = [_with_container_defaults(container, defaults) for container in containers]
    if spec.get("initContainers"):
        spec["initContainers"] = [_with_container_defaults(entry, defaults) for entry in spec["initContainers"]]
    return {**template, "metadata": metadata, "spec": spec}


def literals(defaults: TemplateDefaults) -> dict[str, str]:
    """Return the variables whose values stand there. The trainer gets them with the other defaults (environment.py)."""
    return {entry["name"]: entry.get("value", "") for entry in defaults.get("env") or [] if "valueFrom" not in entry}


def _with_container_defaults(container: Mapping[str, Any], defaults: TemplateDefaults) -> dict[str, Any]:
    filled = dict(container)
    if "env" in defaults:
        is_trainer = container.get("name") == CONTAINER
        entries = [entry for entry in defaults["env"] if not is_trainer or "valueFrom" in entry]
        given = {entry.get("name") for entry in container.get("env") or []}
        # First: the template's own may refer to them with $(NAME).
        filled["env"] = [*(entry for entry in entries if entry["name"] not in given), *(container.get("env") or [])]
    if "volumeMounts" in defaults:
        filled["volumeMounts"] = _appended(container.get("volumeMounts"), defaults["volumeMounts"], "mountPath")
    return filled


def _appended(own: list[dict[str, Any]] | None, defaults: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    def called(entry: dict[str, Any]) -> Any:
        return place(entry.get(key)) if key == "mountPath" else entry.get(key)

    given = {called(entry) for entry in own or []}
    return [*(own or []), *(entry for entry in defaults if called(entry) not in given)]


def place(path: str | None) -> str:
    """Return the path as the node writes it, for which a relative one begins at the root."""
    return posixpath.normpath(f"/{(path or '').lstrip('/')}")
