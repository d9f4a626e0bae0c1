"""`disttrain plan job.yaml`: the objects of a job, and what a rank needs and does, before anything is created."""

import json

from disttrain.errors import USAGE, CommandError
from disttrain.output import print_stderr, show
from disttrain.planning.cost import Machine, StepTime, step_time
from disttrain.planning.machine import Given, machine_of
from disttrain.planning.memory import rank_memory
from disttrain.planning.objects import planned_objects
from disttrain.planning.rank import RankMemory, misfit, on_one_gpu
from disttrain.terminal import is_terminal, rendered, table
from disttrain.validate import STDIN, accepted, summary
from disttrain.views import plan as view
from disttrain.views import step as step_view
from disttrain_api.memory import builtin_size
from disttrain_api.mesh import Mesh
from disttrain_api.spec import JobSpec


def plan(path: str, rank: int, given: Given, *, as_json: bool) -> int:
    """Print the plan of the manifest. Returns the command's exit code. Raises CommandError.

    given: what the job is to run on; 1 is returned where the rank needs more memory.
    """
    gpu_bytes = given.device_bytes
    job = accepted(path)
    if job is None:
        return 1
    ranks = job.spec.world_size
    if not 0 <= rank < ranks:
        raise CommandError(f"--rank: found {rank}, expected 0 to {ranks - 1}: the job has {ranks} ranks", USAGE)
    machine = machine_of(given, job.spec) if given.asks_for_time(job.spec) and job.spec.training is not None else None
    objects, mesh = planned_objects(job), Mesh.of(job.spec.parallelism, ranks)
    memory = rank_memory(job, rank)
    time = None if machine is None or memory.work is None else step_time(memory.work, machine)
    found = None if gpu_bytes is None else misfit(memory, gpu_bytes, job.spec)
    if as_json:
        data = view.as_data(objects, mesh, ranks, memory) | {"step": step_view.as_data(memory.work, time, machine)}
        show(json.dumps(data, indent=2))
        return _verdict(found)
    rows = view.memory_rows(memory)
    parts = [summary(job), "", table(view.OBJECT_HEADINGS, map(view.object_row, objects))]
    if rows:
        parts += ["", f"of rank {rank} of {ranks}:", table(view.MEMORY_HEADINGS, rows)]
    parts += _step(job.spec, memory, machine, time)
    parts += ["", *view.remarks(memory)]
    if time is not None and machine is not None:
        parts += step_view.remarks(machine)
    if gpu_bytes is not None and not on_one_gpu(job.spec):
        parts.append("Whether it fits is not known: not all of a rank is on one GPU.")
    if is_terminal() and found is None and path != STDIN:
        parts.append(f"Next: disttrain submit {path}, or disttrain run {path}")
    show(rendered(*parts))
    return _verdict(found)


def _step(spec: JobSpec, memory: RankMemory, machine: Machine | None, time: StepTime | None) -> list[object]:
    """What is printed of a step."""
    parts: list[object] = []
    if memory.work is not None and (sent := step_view.sent_rows(memory.work)):
        parts += ["", table(step_view.SENT_HEADINGS, sent)]
    if memory.work is not None and machine is not None and time is not None:
        parts += ["", table(step_view.TIME_HEADINGS, step_view.time_rows(memory.work, time, machine))]
    size = None if spec.training is None else builtin_size(spec.training)
    found = list(step_view.formulas(spec, memory.work, machine, None if size is None else size.trained_bytes))
    return [*parts, "", *found] if found else parts


def _verdict(found: str | None) -> int:
    if found is None:
        return 0
    print_stderr(f"disttrain: {found}")
    return 1
