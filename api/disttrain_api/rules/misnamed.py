"""Containers that were meant to train and are not called `trainer`.

Other operators look for other names, or take the first container. Here each further container runs beside `trainer`.
"""

from collections.abc import Iterator

from disttrain_api.names import CONTAINER
from disttrain_api.role import RolePods
from disttrain_api.spec import JobSpec
from disttrain_api.structural import shorten


def call_it_trainer(role: RolePods | None) -> str | None:
    """Return the advice for a role without a program if a container of another name has one."""
    names = [] if role is None else _programs(role)
    if not names:
        return None
    if len(names) == 1:
        return f"call the container {names[0]} `{CONTAINER}`"
    return f"call the one of the containers {', '.join(names)} that trains `{CONTAINER}`"


def advice(spec: JobSpec) -> Iterator[str]:
    """Return warnings about a spec that breaks no rule."""
    if spec.training is None:
        return
    for field, role in (("workers", spec.workers), ("parameterServers", spec.parameter_servers)):
        names = [] if role is None or role.image is not None else _programs(role)
        # Several may well be helpers of a trainer that has all it needs.
        if len(names) == 1:
            yield (
                f"spec.{field}.template: the container {names[0]} runs beside the container `{CONTAINER}`, whose image"
                f" is the operator's: call it `{CONTAINER}` if its image is to train, else add `- name: {CONTAINER}`"
            )


def _programs(role: RolePods) -> list[str]:
    """The names of the containers that have a program, in back-quotes; none where one is called `trainer`."""
    pod = role.template.get("spec")
    found = pod.get("containers") if isinstance(pod, dict) else None
    containers = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    if any(container.get("name") == CONTAINER for container in containers):
        return []
    return [
        f"`{shorten(str(container.get('name')))}`"
        for container in containers
        if container.get("image") or container.get("command")
    ]
