"""What a rank needs: the trainer's own build and step on tensors without memory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from disttrain.errors import CommandError
from disttrain.extras import lacking
from disttrain.planning.rank import RankMemory
from disttrain.planning.trainer import Request, answers
from disttrain_api.memory import builtin_size, least_memory
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.spec import DistTrainingJob


def rank_memory(manifest: DistTrainingJob, rank: int) -> RankMemory:
    """Return what a rank of the job needs. Raises CommandError where the trainer refuses the job."""
    if manifest.spec.training is None:
        return RankMemory(rank, unknown="the job has a command of its own")
    if (missing := lacking()) is not None:
        return RankMemory(rank, unknown=missing, least=_counted(manifest))
    (answer,) = answers([Request(manifest, rank)])
    return read_answer(manifest, rank, answer)


def read_answer(manifest: DistTrainingJob, rank: int, answer: Mapping[str, Any]) -> RankMemory:
    """Return what the trainer has answered. Raises CommandError where it refuses the job."""
    if "error" in answer:
        raise CommandError(f"rank {rank} could not be built: {answer['error']}")
    try:
        found = TypeAdapter(RankMemory).validate_python(answer)
    except ValidationError as error:
        raise CommandError(f"the trainer's answer is not an estimate: {error.errors()[0]['msg']}") from error
    return found if found.parameters is not None else replace(found, least=_counted(manifest))


def _counted(manifest: DistTrainingJob) -> int | None:
    spec = manifest.spec
    size = builtin_size(spec.training) if spec.training is not None else None
    if size is None or spec.training is None:
        return None
    mode, ranks = spec.parallelism.data_parallel.mode, spec.world_size
    by_servers = mode is DataParallelMode.PARAMETER_SERVER
    each = spec.workers.ranks_per_pod
    mesh = Mesh.of_group(spec.parallelism, each) if by_servers else Mesh.of(spec.parallelism, ranks)
    return least_memory(size, spec.training, mesh, mode).peak
