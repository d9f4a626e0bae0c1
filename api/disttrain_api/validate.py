"""Everything that is wrong with a job, in one go.

The models say what is wrong with single fields, the schema of pod templates what is wrong with those, the built-in
models and data sets what is wrong with their `config`, and the rules what does not go together. A rule is asked only
where all that it looks at is right in itself: nobody is told that numbers do not fit when one of them is misspelt.
"""

import copy
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from disttrain_api import sentences, structural
from disttrain_api.builtin import config_problems
from disttrain_api.choices import choices_problems
from disttrain_api.cut_sizes import cut_problems
from disttrain_api.document_mask import document_mask_problems
from disttrain_api.iterated import iterated_problems
from disttrain_api.moved import with_successor
from disttrain_api.names import GENERATED_LENGTH
from disttrain_api.pod_template import claim_template_schema, pod_template_schema, trainer_schema
from disttrain_api.queue_label import queue_label, with_queue_of_label
from disttrain_api.rules import NAME_RULES, RULES
from disttrain_api.samples import samples_problems
from disttrain_api.sentences import MAX_PROBLEMS
from disttrain_api.size import size_problems
from disttrain_api.spec import DistTrainingJob, JobSpec
from disttrain_api.violation import Location, Violation

_NAME: Location = ("metadata", "name")
_GENERATED_NAME: Location = ("metadata", "generateName")
_WORKERS: Location = ("spec", "workers")
_SERVERS: Location = ("spec", "parameterServers")
_CLAIM: Location = ("spec", "storage", "volumeClaimTemplate")
_PARALLELISM: Location = ("spec", "parallelism")
_CONFIGURED: tuple[Location, ...] = tuple(
    ("spec", "training", part) for part in ("model", "data", "loss", "evaluation")
)

# Those of Kubernetes' ObjectMeta, as a job read back from a cluster has them.
_METADATA_FIELDS = (
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
)

# For rules that look at other fields. Nothing is said about these themselves.
_STAND_INS: dict[Location, Any] = {
    ("metadata",): {"name": "unnamed"},
    ("metadata", "name"): "unnamed",
    ("spec", "workers"): {},
    ("spec", "training", "model"): {},
    ("spec", "training", "data"): {},
    ("spec", "training", "steps"): 1,
}

_ABSENT = object()
_INDEX = re.compile("[0-9]{1,9}")

# What is left out uncovers what is wrong elsewhere, seldom more than once.
_MAX_ROUNDS = 5


def problems(subject: JobSpec | DistTrainingJob | Mapping[str, Any]) -> list[Violation]:
    """The problems of a spec, of a job, or of a manifest as it was read."""
    if isinstance(subject, JobSpec):
        return spec_problems(subject)
    if isinstance(subject, DistTrainingJob):
        return [*_name_problems(subject), *spec_problems(subject.spec)]
    return read_job(subject)[1]


def spec_problems(spec: JobSpec) -> list[Violation]:
    """Return the problems between fields of a spec whose fields are valid by themselves."""
    found = list(_template_problems(spec))
    found += _rule_problems(spec, found)
    return [*found, *_config_problems(spec, found)]


def read_spec(raw: Any, labels: Any = None) -> tuple[JobSpec | None, list[Violation]]:
    """The spec of a stored job with these labels, None where its fields cannot be read, and all its problems."""
    job, found = read_job({"metadata": {"name": "stored", "labels": queue_label(labels)}, "spec": raw})
    return (job.spec if job else None), found


def read_job(raw: Any) -> tuple[DistTrainingJob | None, list[Violation]]:
    """The job in a manifest, None where its fields cannot be read, and its problems, at most MAX_PROBLEMS of them."""
    too_large = size_problems(raw)
    if too_large:
        return None, too_large
    job, found = _read_fields(raw)
    usable = job or _without(raw, found)
    if usable is not None:
        usable, wrong_queue = with_queue_of_label(usable)
        job = usable if job else None
        found += wrong_queue
        found += _template_problems(usable.spec)
        found += _rule_problems(usable.spec, found)
        found += _config_problems(usable.spec, found)
        if not _is_in_doubt(_NAME, found):
            found += _name_problems(usable)
    return job, found[:MAX_PROBLEMS]


def _read_fields(raw: Any) -> tuple[DistTrainingJob | None, list[Violation]]:
    """The job as far as single fields go."""
    beyond = list(itertools.islice(_beyond_models(raw), MAX_PROBLEMS))
    try:
        # Strictly, and by way of JSON: "2" is no number and 1 is not true, as for the API server.
        return DistTrainingJob.model_validate_json(json.dumps(raw), strict=True, by_alias=True, by_name=False), beyond
    except ValidationError as error:
        wrong = [with_successor(violation) for violation in sentences.violations(error, DistTrainingJob)]
        # A field that does not exist is not asked for a value; one that exists is asked for no other type besides.
        unknown = {violation.location for violation in wrong if violation.message == structural.UNKNOWN_FIELD}
        beyond = [violation for violation in beyond if violation.location not in unknown]
        reported = {violation.location for violation in beyond}
        return None, beyond + [violation for violation in wrong if violation.location not in reported]


def _beyond_models(raw: Any) -> Iterator[Violation]:
    """Return the problems that the models accept: keys without a value, and fields that metadata does not have."""
    if not isinstance(raw, Mapping):
        return
    yield from _empty_values(raw.get("spec"), ("spec",))
    metadata = raw.get("metadata")
    for key, value in metadata.items() if isinstance(metadata, Mapping) else ():
        if key not in _METADATA_FIELDS:
            yield structural.unknown_field(("metadata", key), _METADATA_FIELDS, value)


def _empty_values(value: Any, location: Location) -> Iterator[Violation]:
    """Keys without a value: the API server drops them without a word. Free-form `config` may hold them."""
    if value is None and len(location) > 1:
        yield Violation(location, structural.NO_VALUE)
    # Pod templates, and what is as in a pod, have a schema of their own, which says so, too.
    if isinstance(value, dict) and location[-1] not in ("config", "template", "resources", "volumeClaimTemplate"):
        for key, item in value.items():
            yield from _empty_values(item, (*location, key))


def _template_problems(spec: JobSpec) -> Iterator[Violation]:
    return itertools.islice(_checked_templates(spec), MAX_PROBLEMS)


def _checked_templates(spec: JobSpec) -> Iterator[Violation]:
    schema, container = pod_template_schema(), trainer_schema()
    for role, location in ((spec.workers, _WORKERS), (spec.parameter_servers, _SERVERS)):
        if role is not None:
            yield from structural.check(role.template, schema, (*location, "template"))
            for name, value in role.shortcuts.items():
                yield from structural.check(value, container[name], (*location, name))
    if spec.storage is not None and spec.storage.volume_claim_template is not None:
        yield from structural.check(spec.storage.volume_claim_template, claim_template_schema(), _CLAIM)


def _name_problems(job: DistTrainingJob) -> Iterator[Violation]:
    metadata = job.metadata
    for rule in NAME_RULES:
        message = rule.problem(metadata.name)
        if message is not None and metadata.generate_name is None:
            yield Violation(_NAME, message, metadata.name)
        elif message is not None:
            hint = f"the API server adds {GENERATED_LENGTH} characters"
            yield Violation(_GENERATED_NAME, message, metadata.generate_name, hint)


def _rule_problems(spec: JobSpec, found: Iterable[Violation]) -> list[Violation]:
    found = tuple(found)
    broken = []
    for rule in RULES:
        if any(_is_in_doubt(tuple(path.split(".")), found) for path in rule.reads or (rule.path,)):
            continue
        message = rule.problem(spec)
        if message is not None:
            broken.append(Violation(tuple(rule.path.split(".")), message, hint=rule.hint(spec)))
    return broken


def _config_problems(spec: JobSpec, found: Iterable[Violation]) -> list[Violation]:
    """Return the problems of the configuration of built-in models and data sets, alone and together."""
    found = tuple(found)
    if spec.training is None or any(_is_in_doubt(part, found) for part in _CONFIGURED):
        return []
    training = spec.training
    problems = [*config_problems(training), *choices_problems(training), *samples_problems(training)]
    if not _is_in_doubt(_PARALLELISM, found):
        problems += cut_problems(spec.training, spec.parallelism)
        problems += document_mask_problems(spec.training, spec.parallelism)
        if not _is_in_doubt(_WORKERS, found):
            problems += iterated_problems(spec)
    return [
        Violation(("spec", *(int(part) if _INDEX.fullmatch(part) else part for part in path.split("."))), message)
        for path, message in problems
    ]


def _is_in_doubt(location: Location, found: Iterable[Violation]) -> bool:
    """Whether something is wrong at, above or below the location, or was probably meant to be there."""
    for violation in found:
        wrong = violation.location
        if violation.message == structural.UNKNOWN_FIELD:
            if violation.meant is None:
                continue
            wrong = (*wrong[:-1], violation.meant)
        shorter = min(len(wrong), len(location))
        if wrong[:shorter] == location[:shorter]:
            return True
    return False


def _without(raw: Any, found: list[Violation]) -> DistTrainingJob | None:
    """The job that remains when all wrong fields are left out; None where too little remains.

    Lets the rules speak about what is right, so that a user need not mend one kind of mistake to see the next.
    """
    remaining, wrong = copy.deepcopy(raw), found
    for _ in range(_MAX_ROUNDS):
        left_out = [_leave_out(remaining, violation) for violation in _one_for_each_place(wrong)]
        # What is wrong and cannot be left out would be found again and again.
        if not any(left_out):
            return None
        job, wrong = _read_fields(remaining)
        if job is not None:
            return job
    return None


def _one_for_each_place(wrong: list[Violation]) -> Iterable[Violation]:
    return {violation.location: violation for violation in wrong}.values()


def _leave_out(raw: Any, violation: Violation) -> bool:
    """Delete a wrong value, or put something in place of a missing one. False where nothing was changed."""
    location = violation.location
    if not location:
        return False
    if violation.message == sentences.MISSING:
        if location in _STAND_INS:
            _parent(raw, location)[location[-1]] = copy.deepcopy(_STAND_INS[location])
            return True
        location = location[:-1]
    # An item of a list takes the list with it: the others would else move, and their problems with them.
    while location and not isinstance(_parent(raw, location), dict):
        location = location[:-1]
    return bool(location) and _parent(raw, location).pop(location[-1], _ABSENT) is not _ABSENT


def _parent(raw: Any, location: Location) -> Any:
    for part in location[:-1]:
        if isinstance(raw, list) and isinstance(part, int) and part < len(raw):
            raw = raw[part]
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
    return raw
