"""`disttrain describe`: a job with its mesh, pods, attempts and events as one page. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import prod
from typing import Any

from disttrain.cluster.remote import RemoteJob
from disttrain.logs.pick import Pick, picked
from disttrain.terminal import age, duration, plain, steps
from disttrain.views.case import facts_of, restarts_in_place
from disttrain.views.goodput import in_words
from disttrain.views.listing import percent
from disttrain_api.status import Attempt, ConditionType
from disttrain_api.times import parse_time

Raw = Mapping[str, Any]

MAX_CELLS = 256
"""Ranks that the mesh is drawn with."""
_STATES = {"runs": "●", "waits": "○", "done": "✓", "failed": "✗", "none": "·"}


def heading(job: RemoteJob, now: datetime) -> list[tuple[str, str]]:
    """Return the page's first lines: what the job is, and where it stands."""
    status, spec = job.status, job.raw.get("spec")
    rows = [
        ("Name", job.name),
        ("Namespace", job.namespace),
        ("Phase", job.phase),
        ("Age", age(job.created, now)),
        ("Ranks", str(status.world_size) if status.world_size is not None else "-"),
        ("Mesh", status.mesh or "-"),
        ("Ready", status.ready or "-"),
        ("Attempt", str(status.attempt)),
        ("Restarts", f"{status.restarts} ({status.restarts_since_checkpoint} since the last checkpoint)"),
    ]
    if isinstance(spec, Mapping) and isinstance(spec.get("training"), Mapping):
        training = spec["training"]
        model, data = (training.get(part) or {} for part in ("model", "data"))
        rows.append(("Trains", f"{_named(model)} on {_named(data)}, {training.get('steps')} steps"))
    if status.progress is not None:
        known = status.progress
        parts = [f"step {steps(known.step, known.total_steps)}{percent(known.step, known.total_steps)}"]
        parts += [f"loss {known.loss:.4g}"] if known.loss is not None else []
        parts += [f"{known.samples_per_second:,.0f} samples/s"] if known.samples_per_second is not None else []
        parts += [f"{metric.name} {metric.value:.4g}" for metric in known.metrics]
        last = parse_time(known.last_step_time)
        parts += [f"last step {age(last, now)} ago"] if last is not None and not status.completion_time else []
        rows.append(("Progress", "  ".join(parts)))
    slow = job.condition(ConditionType.STRAGGLING)
    if slow is not None and slow.status == "True":
        rows.append(("Straggler", slow.message))
    hangs = job.condition(ConditionType.HANG_SUSPECTED)
    if hangs is not None and hangs.status == "True":
        rows.append(("Seems to hang", hangs.message))
    if status.checkpoint is not None:
        when = age(parse_time(status.checkpoint.time), now)
        rows.append(("Checkpoint", f"step {status.checkpoint.step}, {when} ago, {status.checkpoint.path}"))
    if status.goodput is not None:
        rows.append(("Goodput", in_words(status.goodput, now)))
    return [(name, plain(value)) for name, value in rows]


def _named(part: Any) -> str:
    return str(part.get("name") or part.get("entrypoint") or "-") if isinstance(part, Mapping) else "-"


def mesh_lines(job: RemoteJob, pods: Sequence[Raw]) -> list[str]:
    """Return the mesh as a grid: a line for each replica, its ranks in the order of shard, context and tensor, with
    their state.

    ● runs, ○ waits, ✓ has ended well, ✗ has failed, · has no pod.
    """
    spec, status = job.raw.get("spec"), job.status
    world = status.world_size
    if world is None or world < 1:
        return []
    if world > MAX_CELLS:
        return [f"{world} ranks; at most {MAX_CELLS} are drawn"]
    degrees = _degrees(spec, world)
    if degrees is None:
        return []
    states = _states(pods, spec, status.attempt)
    lines = []
    pipeline, replicate, *shards, tensor = degrees
    blocks = prod(shards)
    for stage in range(pipeline):
        for replica in range(replicate):
            first = (stage * replicate + replica) * blocks * tensor
            cells = [
                " ".join(f"{_STATES[states.get(rank, 'none')]}{rank}" for rank in range(at, at + tensor))
                for at in range(first, first + blocks * tensor, tensor)
            ]
            before = (f"stage {stage}  " if pipeline > 1 else "") + f"replica {replica}"
            lines.append(f"{before:<18} {' | '.join(cells)}")
    return lines


def _degrees(spec: Any, world: int) -> tuple[int, ...] | None:
    """Return the degrees along the mesh's axes of a raw spec, None where they cannot be read."""
    from disttrain_api.errors import LayoutError
    from disttrain_api.mesh import Mesh
    from disttrain_api.parallelism import Parallelism

    try:
        given = spec.get("parallelism") or {}
        parallelism = Parallelism.model_validate(given, by_alias=True, by_name=False)
        return Mesh.of(parallelism, world).degrees
    except (LayoutError, ValueError, AttributeError):
        return None


def _states(pods: Sequence[Raw], spec: Any, attempt: int) -> dict[int, str]:
    return {
        rank: _state(raw) for raw in pods for pod in picked([raw], spec, Pick(attempt=attempt)) for rank in pod.ranks
    }


def _state(raw: Raw) -> str:
    """Return the state of the pod's program, whatever additional containers do."""
    facts = facts_of(raw)
    if facts is None or not facts.program_started or facts.awaits_address is not None:
        return "waits"
    if facts.program_failed:
        return "failed"
    return "done" if facts.program_succeeded else "runs"


POD_HEADINGS = ("POD", "RANKS", "ATTEMPT", "STATE", "NODE", "AGE")


def pod_rows(job: RemoteJob, pods: Sequence[Raw], now: datetime, *, most: int = 64) -> Iterator[list[str]]:
    """Yield the cells of the pods, by attempt, role and index; at most so many."""
    by_uid = {str((raw.get("metadata") or {}).get("uid")): raw for raw in pods}
    found = picked(pods, job.raw.get("spec"), Pick())
    for pod in found[:most]:
        raw = by_uid[pod.uid]
        metadata = raw["metadata"]
        state = "ending" if metadata.get("deletionTimestamp") else _state(raw)
        ranks = f"{pod.ranks[0]}-{pod.ranks[-1]}" if len(pod.ranks) > 1 else str(pod.ranks[0]) if pod.ranks else "ps"
        node = (raw.get("spec") or {}).get("nodeName") or "-"
        made = parse_time(metadata.get("creationTimestamp"))
        yield [pod.name, ranks, str(pod.attempt), state, str(node), age(made, now)]
    if len(found) > most:
        yield [f"and {len(found) - most} more", "", "", "", "", ""]


ATTEMPT_HEADINGS = ("ATTEMPT", "BEGAN", "RAN", "CHECKPOINT", "REASON", "WHY IT ENDED")


def attempt_row(attempt: Attempt, now: datetime) -> list[str]:
    """Return the cells of an attempt."""
    began, end = parse_time(attempt.start_time), parse_time(attempt.end_time)
    ran = parse_time(attempt.running_time)
    lasted = "-" if ran is None else duration(((end or now) - ran).total_seconds())
    verdict = attempt.verdict
    ended = verdict.message if verdict is not None else ("" if end else "it is under way")
    in_place = restarts_in_place(attempt)
    return [
        str(attempt.number),
        f"{age(began, now)} ago",
        lasted,
        "-" if attempt.checkpoint_step is None else f"step {attempt.checkpoint_step}",
        verdict.reason if verdict is not None else "-",
        ended if in_place is None else f"{ended}; {in_place}" if ended else in_place,
    ]
