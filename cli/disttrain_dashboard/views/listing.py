"""Rows of the list: jobs -> JSON. Pure."""

from typing import Any

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.status import Phase
from disttrain_dashboard.source import Job, Listing, Raw
from disttrain_dashboard.views.bounded import name, number, part, text

MAX_JOBS = 2000


def listing(found: Listing, title: str) -> dict[str, Any]:
    """Return the page of all jobs: at most MAX_JOBS of them."""
    more = found.more
    if len(found.jobs) > MAX_JOBS:
        more = f"{len(found.jobs) - MAX_JOBS} more jobs are not shown."
    return {"title": text(title), "jobs": [row(job) for job in found.jobs[:MAX_JOBS]], "more": text(more)}


def row(job: Job) -> dict[str, Any]:
    """Return a job as a row; None stands for what is not known."""
    status, metadata = job.status, part(job.raw, "metadata")
    known = status.progress
    step = job.step if job.step is not None else known.step if known is not None else None
    rate = job.rate if job.rate is not None else known.samples_per_second if known is not None else None
    loss = job.loss if job.loss is not None else known.loss if known is not None else None
    left = job.left_seconds if job.left_seconds is not None else known.remaining_seconds if known is not None else None
    phase = name(job.phase or status.phase or Phase.PENDING.value)
    return {
        "key": job.key,
        "name": name(part(metadata, "name")),
        "namespace": name(part(metadata, "namespace")),
        "phase": phase,
        "strategy": strategy(job.raw, status.mesh),
        "ranks": number(status.world_size),
        "step": number(step),
        "total": number(known.total_steps) if known is not None else _steps(job.raw),
        "loss": number(loss),
        "rate": number(rate),
        "left": number(left) if phase == Phase.RUNNING else None,
        "leftAt": name(known.update_time) if known is not None and job.left_seconds is None else "",
        "goodput": number(status.goodput.percent) if status.goodput is not None else None,
        "restarts": number(status.restarts),
        "created": name(part(metadata, "creationTimestamp")),
        "finished": name(status.completion_time),
        "deleted": job.deleted,
    }


def strategy(raw: Raw, mesh: str | None) -> str:
    """Return how the work is divided: "pp2 x dp8, 1F1B"."""
    spec = part(raw, "spec")
    mode = part(spec, "parallelism", "dataParallel", "mode")
    words = [
        mesh,
        mode if mode != DataParallelMode.ALL_REDUCE.value else None,
        part(spec, "parallelism", "pipeline", "schedule"),
        "own program" if spec is not None and part(spec, "training") is None else None,
    ]
    return ", ".join(name(word) for word in words if isinstance(word, str) and word)


def _steps(raw: Raw) -> float | int | None:
    return number(part(raw, "spec", "training", "steps"))
