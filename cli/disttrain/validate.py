"""`disttrain validate job.yaml`: everything that is wrong with a manifest, before anything is applied."""

import sys

from disttrain.output import print_stderr, show
from disttrain_api import manifest
from disttrain_api.bounds import MAX_LISTED
from disttrain_api.errors import ManifestError
from disttrain_api.mesh import Mesh
from disttrain_api.names import KIND
from disttrain_api.rules.misnamed import advice
from disttrain_api.spec import DistTrainingJob
from disttrain_api.violation import Violation

STDIN = "-"
"""The file that stands for standard input, as for kubectl."""


def validate(path: str) -> int:
    """Print what is wrong with the manifest, or what it asks for. Returns the command's exit code."""
    job = accepted(path)
    if job is None:
        return 1
    show(f"{_source(path)}: valid: {summary(job)}")
    return 0


def accepted(path: str) -> DistTrainingJob | None:
    """Return the job of a manifest; None after its errors have been printed."""
    try:
        return given(path)
    except ManifestError as error:
        _print_problems(error.source, error.problems)
        return None


def given(path: str) -> DistTrainingJob:
    """The job of a manifest, for all verbs that take one. Raises ManifestError."""
    source = _source(path)
    found = manifest.read_stream(sys.stdin.buffer, source) if path == STDIN else manifest.read(path)
    if found.others:
        print_stderr(f"{source}: skipped {found.others}: this command reads the {KIND} alone")
    for sentence in advice(found.job.spec):
        print_stderr(f"{source}: {sentence}")
    return found.job


def _source(path: str) -> str:
    return "standard input" if path == STDIN else path


def summary(job: DistTrainingJob) -> str:
    """Return a one-line summary of a valid job."""
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
        print_stderr(f"{path}: {len(problems)} problems")
    for problem in problems[:MAX_LISTED]:
        where = f"{path}:{problem.line}" if problem.line else path
        print_stderr(f"{where}: {problem}")
    if len(problems) > MAX_LISTED:
        print_stderr(f"{path}: and {len(problems) - MAX_LISTED} more")


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
