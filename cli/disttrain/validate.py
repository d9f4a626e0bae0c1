"""`disttrain validate job.yaml`: everything that is wrong with a manifest, before anything is applied."""

from disttrain.output import show, tell
from disttrain_api import manifest
from disttrain_api.bounds import MAX_LISTED
from disttrain_api.errors import ManifestError
from disttrain_api.mesh import Mesh
from disttrain_api.spec import DistTrainingJob
from disttrain_api.violation import Violation


def validate(path: str) -> int:
    """Print what is wrong with the manifest, or what it asks for. Returns the command's exit code."""
    try:
        job = manifest.load(path)
    except ManifestError as error:
        _print_problems(path, error.problems)
        return 1
    show(f"{path}: valid: {summary(job)}")
    return 0


def summary(job: DistTrainingJob) -> str:
    """What a valid job asks for, in one line."""
    workers = job.spec.workers
    mesh = Mesh.of(job.spec.parallelism, job.spec.world_size)
    parts = [f"{_count(workers.replicas, 'worker pod')} x {_count(workers.ranks_per_pod, 'process', 'processes')}"]
    if workers.gpus_per_pod:
        parts.append(f"{_count(workers.gpus_per_pod, 'GPU')} per pod")
    if job.spec.parameter_servers:
        parts.append(_count(job.spec.parameter_servers.replicas, "parameter server"))
    return ", ".join([f"{job.metadata.name}, {parts[0]}", *parts[1:], f"mesh {mesh.describe()}"])


def _print_problems(path: str, problems: tuple[Violation, ...]) -> None:
    if len(problems) > 1:
        tell(f"{path}: {len(problems)} problems")
    for problem in problems[:MAX_LISTED]:
        where = f"{path}:{problem.line}" if problem.line else path
        tell(f"{where}: {problem}")
    if len(problems) > MAX_LISTED:
        tell(f"{path}: and {len(problems) - MAX_LISTED} more")


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
