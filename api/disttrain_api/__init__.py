"""The language that every side of disttrain speaks: the job, its status, its arithmetic, its rules.

    job = disttrain_api.load("examples/ddp.yaml")       # DistTrainingJob, or ManifestError with every problem
    job.spec.workers.replicas, job.spec.world_size

Names that cross a border (labels, variables, exit codes) are in `disttrain_api.names`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disttrain_api.errors import DisttrainError, LayoutError, ManifestError
    from disttrain_api.manifest import load, parse
    from disttrain_api.mesh import Mesh
    from disttrain_api.spec import DistTrainingJob, JobSpec
    from disttrain_api.status import JobStatus
    from disttrain_api.validate import problems
    from disttrain_api.violation import Violation

__all__ = [
    "DistTrainingJob",
    "DisttrainError",
    "JobSpec",
    "JobStatus",
    "LayoutError",
    "ManifestError",
    "Mesh",
    "Violation",
    "load",
    "parse",
    "problems",
]

_MODULES = {
    "DistTrainingJob": "spec",
    "DisttrainError": "errors",
    "JobSpec": "spec",
    "JobStatus": "status",
    "LayoutError": "errors",
    "ManifestError": "errors",
    "Mesh": "mesh",
    "Violation": "violation",
    "load": "manifest",
    "parse": "manifest",
    "problems": "validate",
}


def __getattr__(name: str) -> Any:
    # The models take a third of a second to build: who needs a name of `names` alone does not wait for them.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
