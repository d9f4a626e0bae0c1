"""What a refusal is, and the changes of a valid manifest that refusals are made of."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.builders import a_manifest

WORKERS, SERVERS = "spec.workers.template", "spec.parameterServers.template"
IMAGE = {"name": "trainer", "image": "an/image:1"}


@dataclass(frozen=True)
class Refusal:
    """`spec` laid over a valid manifest breaks the rule, and nothing but the rule."""

    rule: str
    path: str
    message: str
    spec: Mapping[str, Any]

    @property
    def manifest(self) -> dict[str, Any]:
        """The whole manifest."""
        return a_manifest("refused", **self.spec)


def own_program(*containers: Mapping[str, Any], **pod: Any) -> dict[str, Any]:
    """A template that runs an image of its own."""
    return {"template": {"spec": {"containers": list(containers or (IMAGE,)), **pod}}}


def untrained(workers: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """Changes that take `training` away and lay something over the workers."""
    return {"training": None, "workers": workers, **spec}


def servers(*containers: Mapping[str, Any], metadata: Any = None, **pod: Any) -> dict[str, Any]:
    """Changes that add parameter servers with this template."""
    template = own_program(*containers, **pod)["template"] | ({"metadata": metadata} if metadata else {})
    return untrained(own_program(), parameterServers={"template": template})


def pods(replicas: int, processes: int | None = None) -> dict[str, Any]:
    """Changes that give the job this many pods and processes."""
    return {"replicas": replicas} | ({"processesPerPod": processes} if processes else {})


RESERVED_VARIABLES = (
    "environment variables that begin with 'DISTTRAIN_', and MASTER_ADDR, MASTER_PORT, WORLD_SIZE, NODE_RANK,"
    " GROUP_RANK, LOCAL_WORLD_SIZE, RANK, LOCAL_RANK, PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR,"
    " PET_MASTER_PORT, PET_RDZV_ID, are set by the operator: remove them from the container `trainer`"
)
