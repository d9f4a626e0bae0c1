"""The pods of one role: how many there are, and what their container `trainer` runs."""

from typing import Annotated, Any

from pydantic import Field, JsonValue

from disttrain_api.base import ApiModel
from disttrain_api.names import CONTAINER, MAX_REPLICAS

Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Words = Annotated[list[Annotated[str, Field(max_length=65_536)]], Field(min_length=1, max_length=256)]

# The API server checks these against the real schema of a PodTemplateSpec; here they are plain JSON.
PodTemplate = dict[str, JsonValue]
_Entry = dict[str, JsonValue]

SHORTCUTS = ("image", "command", "args", "env", "envFrom", "resources")
"""Fields of the container `trainer` that may stand beside `template` instead of in it."""


class RolePods(ApiModel):
    """The pods of a role."""

    replicas: Replicas = 1
    """Number of pods."""
    image: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Image of the container `trainer`. Absent: the template's, else the operator's default."""
    command: Words | None = None
    """Command of the container `trainer`, for example [torchrun, train.py]."""
    args: Words | None = None
    """Arguments of the container `trainer`."""
    env: Annotated[list[_Entry], Field(max_length=256)] | None = None
    """Environment of the container `trainer`, as in a pod."""
    env_from: Annotated[list[_Entry], Field(max_length=64)] | None = None
    """Secrets and ConfigMaps whose keys are variables of the container `trainer`, as in a pod."""
    resources: _Entry | None = None
    """Requests and limits of the container `trainer`, as in a pod. Request GPUs with `gpusPerPod`."""
    template: PodTemplate = {}
    """A PodTemplateSpec, all of it optional. Its container `trainer` may not repeat the fields above."""

    @property
    def pod_template(self) -> dict[str, Any]:
        """The template with the fields beside it put into its container `trainer`."""
        given = self.shortcuts
        if not given:
            return self.template
        spec = self.template.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        containers = spec.get("containers")
        containers = list(containers) if isinstance(containers, list) else []
        place = next(
            (index for index, found in enumerate(containers) if isinstance(found, dict) and _is_trainer(found)), None
        )
        if place is None:
            containers.append({"name": CONTAINER, **given})
        else:
            containers[place] = {**containers[place], **given}  # type: ignore[dict-item]
        return {**self.template, "spec": {**spec, "containers": containers}}

    @property
    def shortcuts(self) -> dict[str, JsonValue]:
        """The fields that stand beside the template, by their names in a container."""
        return {name: value for name in SHORTCUTS if (value := getattr(self, _FIELDS[name])) is not None}


_FIELDS = {name: "env_from" if name == "envFrom" else name for name in SHORTCUTS}


def _is_trainer(container: dict[str, Any]) -> bool:
    return container.get("name") == CONTAINER
