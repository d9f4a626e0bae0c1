"""Rules for the programs of a job's pods, and for parts of a pod template that only the operator may set."""

from collections.abc import Callable, Iterable
from typing import Any

from disttrain_api.names import CONTAINER, RESERVED_PREFIX, Env, Label
from disttrain_api.role import SHORTCUTS, RolePods
from disttrain_api.rules.misnamed import call_it_trainer
from disttrain_api.rules.reserved import (
    RESERVED_ANNOTATION,
    RESERVED_LABEL,
    has_reserved_annotation,
    has_reserved_label,
    metadata_is_reserved,
)
from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec

VOLUME_PREFIX = "disttrain-"
_RESERVED_VARIABLES = "DISTTRAIN_"
"""What no variable of a template may begin with."""
_TORCHRUN_VARIABLES = tuple(
    value for key, value in vars(Env).items() if key.isupper() and not value.startswith(_RESERVED_VARIABLES)
)
_OPERATORS_VARIABLE = (
    f"environment variables that begin with '{_RESERVED_VARIABLES}', and {', '.join(_TORCHRUN_VARIABLES)}, are set by"
    " the operator: remove them from the container `trainer`"
)
# CEL: the variable (e) is the operator's to set.
_IS_RESERVED = f"e.name.startsWith('{_RESERVED_VARIABLES}') || e.name in {list(_TORCHRUN_VARIABLES)}"

_HOST_NAMES = ("hostname", "subdomain", "hostnameOverride")
_SPECS = {"Workers": "spec.workers", "Servers": "spec.parameterServers"}
_ROLES = {role: f"{path}.template" for role, path in _SPECS.items()}


def role_of(spec: JobSpec, path: str) -> RolePods | None:
    """Return the role whose path, or whose template's path, this is; None where the job has no such role."""
    return spec.workers if path.startswith(_SPECS["Workers"]) else spec.parameter_servers


def template_of(spec: JobSpec, path: str) -> dict[str, Any]:
    """The pod template of a role, {} where the job has no such role."""
    role = role_of(spec, path)
    return role.template if role else {}


# Templates are plain JSON here. What has the wrong type is pod_template.py's to say: these helpers see nothing there.
def _object(value: Any, key: str) -> dict[str, Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def _objects(value: Any, key: str) -> list[dict[str, Any]]:
    found = value.get(key) if isinstance(value, dict) else None
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def init_containers_that_end(template: dict[str, Any]) -> list[str]:
    """Return the names of a template's init containers but sidecars."""
    entries = _objects(_object(template, "spec"), "initContainers")
    return [str(entry.get("name")) for entry in entries if entry.get("restartPolicy") != "Always"]


def _trainer(template: dict[str, Any]) -> dict[str, Any]:
    containers = _objects(_object(template, "spec"), "containers")
    return next((container for container in containers if container.get("name") == CONTAINER), {})


def _some_trainer(scope: str, condition: str) -> str:
    """CEL: the template at `scope` has a container `trainer` (c) for which the condition holds."""
    return (
        f"(has({scope}.spec) && has({scope}.spec.containers)"
        f" && {scope}.spec.containers.exists(c, c.name == '{CONTAINER}' && ({condition})))"
    )


_HAS_PROGRAM = "(has(c.command) && c.command.size() > 0) || (has(c.image) && c.image.size() > 0)"
_HAS_COMMAND = "(has(c.command) && c.command.size() > 0) || (has(c.args) && c.args.size() > 0)"


def _has_program(template: dict[str, Any]) -> bool:
    trainer = _trainer(template)
    return bool(trainer.get("command") or trainer.get("image"))


def _has_command(template: dict[str, Any]) -> bool:
    trainer = _trainer(template)
    return bool(trainer.get("command") or trainer.get("args"))


def _per_role(
    identifier: str,
    below: str,
    sentence: str,
    find: Callable[[dict[str, Any]], Values | None],
    cel: str,
    values: dict[str, str] | None = None,
) -> Iterable[Rule]:
    """The same rule for the template of each role. `self` is the field `below` it: without it nothing is asked.

    The API server lays out all fields of an object, forty of a pod's spec, for each look at one of them.
    """
    for role, path in _ROLES.items():
        yield Rule(
            id=f"{role}{identifier}",
            path=f"{path}.{below}",
            scope=f"{path}.{below}",
            sentence=sentence,
            check=lambda spec, path=path: find(template_of(spec, path)),  # type: ignore[misc]
            cel=cel,
            values=values or {},
        )


def _restarts(template: dict[str, Any]) -> Values | None:
    policy = _object(template, "spec").get("restartPolicy", "Never")
    return when(policy != "Never", policy=str(policy))


def _first(names: Iterable[Any]) -> Values | None:
    for name in names:
        return {"name": str(name)}
    return None


def _reserved_in_claim(template: dict[str, Any]) -> Values | None:
    for volume in _objects(_object(template, "spec"), "volumes"):
        metadata = _object(_object(_object(volume, "ephemeral"), "volumeClaimTemplate"), "metadata")
        if has_reserved_label(metadata) or has_reserved_annotation(metadata):
            return {"name": str(volume.get("name", ""))}
    return None


def _operator_volume(template: dict[str, Any]) -> Values | None:
    names = (str(volume.get("name", "")) for volume in _objects(_object(template, "spec"), "volumes"))
    return _first(name for name in names if name.startswith(VOLUME_PREFIX))


def _operator_variable(template: dict[str, Any]) -> Values | None:
    return _reserved_variable(_objects(_trainer(template), "env"))


def _reserved_variable(entries: Iterable[dict[str, Any]]) -> Values | None:
    return when(any(is_operators_variable(str(entry.get("name"))) for entry in entries))


def is_operators_variable(name: str) -> bool:
    """Return whether a container's variable of this name is the operator's to set."""
    return name.startswith(_RESERVED_VARIABLES) or name in _TORCHRUN_VARIABLES


def _env_of(role: RolePods | None) -> list[dict[str, Any]]:
    return list(role.env or ()) if role else []


def _given_twice(role: RolePods | None) -> bool:
    return role is not None and not role.shortcuts.keys().isdisjoint(_trainer(role.template))


def _gpu_in_template(spec: JobSpec) -> Values | None:
    pod, name = _object(spec.workers.pod_template, "spec"), spec.workers.gpu_resource
    containers = (*_objects(pod, "initContainers"), *_objects(pod, "containers"))
    resources = [_object(container, "resources") for container in containers]
    return when(
        any(name in _object(resource, kind) for resource in resources for kind in ("limits", "requests")), name=name
    )


def _program_of(role: str) -> tuple[str, ...]:
    """The fields that say what a role runs."""
    return tuple(f"{role}.{field}" for field in ("image", "command", "args", "template"))


def _has_cel(scope: str, *fields: str) -> str:
    return f"({' || '.join(f'has({scope}.{field})' for field in fields)})"


def _no_gpus_cel(scope: str) -> str:
    wanted = " && ".join(
        f"(!has({scope}.resources.{kind}) || !(self.gpuResource in {scope}.resources.{kind}))"
        for kind in ("limits", "requests")
    )
    return f"(!has({scope}.resources) || ({wanted}))"


def _gpu_cel(containers: str) -> str:
    # Bound to names, `[c.resources].all(r, …)`, it would be looked at less often, but counts as too expensive.
    pods = "self.template.spec"
    return f"(!has({pods}.{containers}) || {pods}.{containers}.all(c, {_no_gpus_cel('c')}))"


_CLAIM = "v.ephemeral.volumeClaimTemplate"
# CEL: the template of the volume's (v) claim has a reserved label or annotation.
_CLAIM_IS_RESERVED = (
    f"has(v.ephemeral) && has({_CLAIM}) && has({_CLAIM}.metadata) && {metadata_is_reserved(f'{_CLAIM}.metadata')}"
)
# CEL: the container `trainer` of the template (c) repeats a field that stands beside the template.
_TWICE = " || ".join(f"(has(self.{name}) && has(c.{name}))" for name in SHORTCUTS)

POD_RULES = (
    Rule(
        id="SomethingToRun",
        path="spec.workers",
        sentence="nothing to run: set `spec.training`, or an `image` or a `command` of the container `trainer`",
        check=lambda spec: when(spec.training is None and not _has_program(spec.workers.pod_template)),
        cel=f"has(self.training) || {_has_cel('self.workers', 'image', 'command')}"
        f" || {_some_trainer('self.workers.template', _HAS_PROGRAM)}",
        reads=("spec.training", *_program_of("spec.workers")),
        hint=lambda spec: call_it_trainer(spec.workers),
    ),
    Rule(
        id="OneProgram",
        path="spec.workers",
        sentence="`spec.training` decides what the container `trainer` runs, so it may have no `command` and no `args`:"
        " remove them, or `spec.training`",
        check=lambda spec: when(spec.training is not None and _has_command(spec.workers.pod_template)),
        cel=f"!has(self.training) || !({_has_cel('self.workers', 'command', 'args')}"
        f" || {_some_trainer('self.workers.template', _HAS_COMMAND)})",
        reads=("spec.training", *_program_of("spec.workers")),
    ),
    Rule(
        id="ServersProgram",
        path="spec.parameterServers",
        sentence="the servers have nothing to run: set an `image` or a `command` of their container `trainer`",
        check=lambda spec: when(
            spec.training is None
            and spec.parameter_servers is not None
            and not _has_program(spec.parameter_servers.pod_template)
        ),
        cel="has(self.training) || !has(self.parameterServers)"
        f" || {_has_cel('self.parameterServers', 'image', 'command')}"
        f" || {_some_trainer('self.parameterServers.template', _HAS_PROGRAM)}",
        reads=("spec.training", *_program_of("spec.parameterServers")),
        hint=lambda spec: call_it_trainer(spec.parameter_servers),
    ),
    Rule(
        id="ServersOneProgram",
        path="spec.parameterServers",
        sentence="`spec.training` decides what the servers' container `trainer` runs, so it may have no `command` and"
        " no `args`: remove them, or `spec.training`",
        check=lambda spec: when(
            spec.training is not None
            and spec.parameter_servers is not None
            and _has_command(spec.parameter_servers.pod_template)
        ),
        cel="!has(self.training) || !has(self.parameterServers)"
        f" || !({_has_cel('self.parameterServers', 'command', 'args')}"
        f" || {_some_trainer('self.parameterServers.template', _HAS_COMMAND)})",
        reads=("spec.training", *_program_of("spec.parameterServers")),
    ),
    Rule(
        id="GpusByGpusPerPod",
        path="spec.workers",
        scope="spec.workers",
        sentence="`{name}` must not be in `resources`: request it with `gpusPerPod`",
        check=_gpu_in_template,
        cel=f"{_no_gpus_cel('self')} && (!has(self.template.spec)"
        f" || ({_gpu_cel('containers')} && {_gpu_cel('initContainers')}))",
        values={"name": "self.gpuResource"},
        reads=("spec.workers.template", "spec.workers.resources", "spec.workers.gpuResource"),
    ),
    *(
        Rule(
            id=f"{role}FieldOnce",
            path=path,
            scope=path,
            sentence=f"{', '.join(f'`{name}`' for name in SHORTCUTS)}: set each of them here or in the template's"
            " container `trainer`, not in both",
            check=lambda spec, path=path: when(_given_twice(role_of(spec, path))),  # type: ignore[misc]
            cel=f"!{_some_trainer('self.template', _TWICE)}",
            reads=(path,),
        )
        for role, path in _SPECS.items()
    ),
    *(
        Rule(
            id=f"{role}EnvironmentBeside",
            path=f"{path}.env",
            scope=f"{path}.env",
            sentence=_OPERATORS_VARIABLE,
            check=lambda spec, path=path: _reserved_variable(_env_of(role_of(spec, path))),  # type: ignore[misc]
            cel=f"!self.exists(e, {_IS_RESERVED})",
        )
        for role, path in _SPECS.items()
    ),
    *_per_role(
        "RestartPolicy",
        "spec.restartPolicy",
        "`restartPolicy` {policy} must be Never: the operator restarts all pods of a job together",
        _restarts,
        "self == 'Never'",
        {"policy": "self"},
    ),
    *(
        rule
        for field in _HOST_NAMES
        for rule in _per_role(
            field[0].upper() + field[1:],
            f"spec.{field}",
            f"`{field}` is set by the operator: remove it",
            lambda template, field=field: when(field in _object(template, "spec")),  # type: ignore[misc]
            "false",
        )
    ),
    *_per_role(
        "Labels",
        "metadata.labels",
        # A message that names the key would count as too expensive: nothing bounds the length of keys.
        f"labels that begin with '{RESERVED_PREFIX}', and '{Label.MANAGED_BY}', are set by the operator: remove them",
        lambda template: when(has_reserved_label(_object(template, "metadata"))),
        f"!self.exists(k, {RESERVED_LABEL})",
    ),
    *_per_role(
        "Annotations",
        "metadata.annotations",
        f"annotations that begin with '{RESERVED_PREFIX}' are set by the operator: remove them",
        lambda template: when(has_reserved_annotation(_object(template, "metadata"))),
        f"!self.exists(k, {RESERVED_ANNOTATION})",
    ),
    *_per_role(
        "Claims",
        "spec.volumes",
        f"the claim of volume `{{name}}` has a label or annotation that begins with '{RESERVED_PREFIX}', or the label"
        f" '{Label.MANAGED_BY}', which are set by the operator: remove them",
        _reserved_in_claim,
        f"!self.exists(v, {_CLAIM_IS_RESERVED})",
        {"name": f"self.filter(v, {_CLAIM_IS_RESERVED})[0].name"},
    ),
    *_per_role(
        "Volumes",
        "spec.volumes",
        f"volume `{{name}}` must not begin with '{VOLUME_PREFIX}', the prefix of the operator's volumes: rename it",
        _operator_volume,
        f"self.all(v, !v.name.startsWith('{VOLUME_PREFIX}'))",
        {"name": f"self.filter(v, v.name.startsWith('{VOLUME_PREFIX}'))[0].name"},
    ),
    *_per_role(
        "Environment",
        "spec.containers",
        _OPERATORS_VARIABLE,
        _operator_variable,
        f"self.all(c, c.name != '{CONTAINER}' || !has(c.env) || !c.env.exists(e, {_IS_RESERVED}))",
    ),
)
