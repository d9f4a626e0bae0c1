"""The memory of a rank: the trainer's own build and step on tensors without memory, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from disttrain.errors import CommandError
from disttrain.planning.objects import Planned
from disttrain.planning.rank import RankMemory
from disttrain_api.memory import builtin_size, least_memory
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.spec import DistTrainingJob
from disttrain_operator.plan.desired import job_config


def rank_memory(manifest: DistTrainingJob, rank: int) -> RankMemory:
    """Return what a rank of the job needs. Raises CommandError where the trainer refuses the job."""
    spec = manifest.spec
    if spec.training is None:
        return RankMemory(rank, unknown="the job has a command of its own")
    answer = _ask_trainer(manifest, rank)
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


def _ask_trainer(manifest: DistTrainingJob, rank: int) -> Mapping[str, Any]:
    """Run the trainer's estimate. Its process sees no GPU: nothing is computed."""
    spec, metadata = manifest.spec, manifest.metadata
    config = job_config(Planned(metadata.name, metadata.namespace or "default", spec))
    assert config is not None
    with tempfile.TemporaryDirectory(prefix="disttrain-plan-") as folder:
        job, result = Path(folder, "job.json"), Path(folder, "result.json")
        job.write_text(json.dumps(config.model_dump(mode="json", by_alias=True, exclude_none=True)))
        command = [sys.executable, "-P", "-m", "disttrain_trainer.estimate", str(job), str(result)]
        command += ["--ranks", str(spec.world_size), "--ranks-per-pod", str(spec.workers.ranks_per_pod)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        # As `disttrain run` does: entry points may lie in the current folder.
        ended = subprocess.run(
            [*command, "--rank", str(rank)], env=environment, capture_output=True, text=True, check=False
        )
        try:
            found = json.loads(result.read_text())
        except (OSError, ValueError) as error:
            last_line = ended.stderr.strip().rpartition("\n")[2]
            raise CommandError(
                f"the trainer ended with exit code {ended.returncode} without an estimate: {last_line}"
            ) from error
    return found if isinstance(found, dict) else {"error": "the trainer wrote no estimate"}
