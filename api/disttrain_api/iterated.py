"""Layouts that cannot take texts which are tokenised while they are read (`lines`): such samples have no numbers.

CEL cannot see how many replicas a layout leaves. The trainer refuses the same of data from an entry point.
"""

from collections.abc import Iterator

from disttrain_api.errors import LayoutError
from disttrain_api.lines import MAX_REPLICAS
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.spec import JobSpec
from disttrain_api.training import DataName
from disttrain_api.transformers_config import Problem

_PLACE = "training.data.name"
_INSTEAD = "prepare a corpus (`disttrain data prepare`)"


def iterated_problems(spec: JobSpec) -> Iterator[Problem]:
    """Yield what of the layout conflicts with `lines`."""
    if spec.training is None or spec.training.data.name is not DataName.LINES:
        return
    if spec.training.data_workers:
        yield "training.dataWorkers", f"must be left out with `training.data.name: lines`, or {_INSTEAD}"
    if spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER:
        yield _PLACE, f"parameter servers assign samples by their numbers, and lines has none: {_INSTEAD}"
        return
    try:
        mesh = Mesh.of(spec.parallelism, spec.world_size)
    except LayoutError:
        # A rule has said so.
        return
    if mesh.pipeline > 1:
        yield _PLACE, f"stages of a pipeline read samples by their numbers, and lines has none: {_INSTEAD}"
    elif MAX_REPLICAS % mesh.data_parallel:
        shared = f"lines is shared by a number of replicas that divides {MAX_REPLICAS}, found {mesh.data_parallel}"
        yield _PLACE, f"{shared}: change `workers.replicas`, or {_INSTEAD}"
