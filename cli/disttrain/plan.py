"""`disttrain plan job.yaml`: the objects and the memory of a job, before anything is created."""

import json

from disttrain.errors import USAGE, CommandError
from disttrain.output import print_stderr, show
from disttrain.planning.memory import rank_memory
from disttrain.planning.objects import planned_objects
from disttrain.planning.rank import misfit, on_one_gpu
from disttrain.terminal import is_terminal, rendered, table
from disttrain.validate import STDIN, accepted, summary
from disttrain.views import plan as view
from disttrain_api.mesh import Mesh
from disttrain_operator.gate.quantities import amount


def plan(path: str, rank: int, gpu_memory: str | None, *, as_json: bool) -> int:
    """Print the plan of the manifest. Returns the command's exit code. Raises CommandError.

    gpu_memory: a quantity; 1 is returned where the rank needs more.
    """
    gpu_bytes = None if gpu_memory is None else _bytes_of(gpu_memory)
    job = accepted(path)
    if job is None:
        return 1
    ranks = job.spec.world_size
    if not 0 <= rank < ranks:
        raise CommandError(f"--rank: found {rank}, expected 0 to {ranks - 1}: the job has {ranks} ranks", USAGE)
    objects, mesh = planned_objects(job), Mesh.of(job.spec.parallelism, ranks)
    memory = rank_memory(job, rank)
    found = None if gpu_bytes is None else misfit(memory, gpu_bytes, job.spec)
    if as_json:
        show(json.dumps(view.as_data(objects, mesh, ranks, memory), indent=2))
        return _verdict(found)
    rows = view.memory_rows(memory)
    parts = [summary(job), "", table(view.OBJECT_HEADINGS, map(view.object_row, objects))]
    if rows:
        parts += ["", f"of rank {rank} of {ranks}:", table(view.MEMORY_HEADINGS, rows)]
    parts += ["", *view.remarks(memory)]
    if gpu_bytes is not None and not on_one_gpu(job.spec):
        parts.append("Whether it fits is not known: not all of a rank is on one GPU.")
    if is_terminal() and found is None and path != STDIN:
        parts.append(f"Next: disttrain submit {path}, or disttrain run {path}")
    show(rendered(*parts))
    return _verdict(found)


def _bytes_of(quantity: str) -> int:
    try:
        size = amount("memory", quantity)
    except ValueError as error:
        raise CommandError(f"--gpu-memory: found '{quantity}', expected a quantity such as 80Gi", USAGE) from error
    if size <= 0:
        raise CommandError(f"--gpu-memory: found '{quantity}', expected more than 0, such as 80Gi", USAGE)
    return size


def _verdict(found: str | None) -> int:
    if found is None:
        return 0
    print_stderr(f"disttrain: {found}")
    return 1
