"""The page of one job: all that is known of it -> JSON. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

from disttrain_api.goodput import by_state
from disttrain_api.status import Attempt, Goodput
from disttrain_dashboard.source import INTERRUPTED, Raw, Seen
from disttrain_dashboard.views.bounded import name, number, part, text
from disttrain_dashboard.views.listing import row
from disttrain_dashboard.views.ranks import grid

MAX_EVENTS = 100
MAX_ATTEMPTS = 50
MAX_STATES = 16
_MAX_METRICS = 16


def page(seen: Seen) -> dict[str, Any]:
    """Return the page of a job."""
    job = seen.job
    status = job.status
    return {
        "job": row(job),
        "why": text(seen.why, 8192),
        "todo": [text(sentence) for sentence in seen.todo[:8]],
        "facts": [[label, text(value)] for label, value in _facts(seen)],
        "ranks": grid(part(job.raw, "spec"), status.world_size, seen.ranks) if not job.deleted else None,
        "panels": list(seen.panels),
        "goodput": goodput(status.goodput, job.phase) if status.goodput is not None else None,
        "attempts": [attempt(one) for one in status.attempts[-MAX_ATTEMPTS:]],
        "events": [event(one) for one in seen.events[-MAX_EVENTS:]],
    }


def _facts(seen: Seen) -> Iterator[tuple[str, str]]:
    status, spec = seen.job.status, part(seen.job.raw, "spec")
    yield from (("Mesh", status.mesh),) if status.mesh else ()
    yield from (("Pods ready", status.ready),) if status.ready and not status.completion_time else ()
    for label, field in (("Model", "model"), ("Data", "data")):
        found = part(spec, "training", field, "name") or part(spec, "training", field, "entrypoint")
        yield from ((label, name(found)),) if found else ()
    if status.checkpoint is not None:
        yield "Checkpoint", f"step {number(status.checkpoint.step)}, {name(status.checkpoint.path)}"
    if status.progress is not None:
        for metric in status.progress.metrics[:_MAX_METRICS]:
            yield f"Held-out {name(metric.name)}"[:64], f"{metric.value:.4g}"
        if status.progress.last_step_time and not status.completion_time:
            yield "Last step", name(status.progress.last_step_time)
        if status.progress.skipped_steps:
            yield "Skipped steps", str(number(status.progress.skipped_steps))
        if status.progress.roll_backs:
            yield "Roll-backs", str(number(status.progress.roll_backs))
    yield "Restarts", str(number(status.restarts))
    yield from (("Kept in", seen.place),) if seen.place else ()


def goodput(known: Goodput, phase: str | None = None) -> dict[str, Any]:
    """Return where the time went, the longest first; the browser goes on counting in `state`, if there is one."""
    spent = sorted(by_state(known).items(), key=lambda entry: -entry[1])[:MAX_STATES]
    return {
        "percent": number(known.percent),
        "state": name(known.state) if phase != INTERRUPTED else "",
        "at": name(known.update_time),
        "spent": [[name(state), number(max(seconds, 0))] for state, seconds in spent],
    }


def attempt(known: Attempt) -> dict[str, Any]:
    """Return an attempt for the time line."""
    verdict = known.verdict
    return {
        "number": number(known.number),
        "start": name(known.start_time),
        "running": name(known.running_time),
        "end": name(known.end_time),
        "reason": name(verdict.reason) if verdict is not None else "",
        "message": text(verdict.message) if verdict is not None else "",
        "failed": verdict is not None and verdict.class_ is not None,
        "checkpoint": number(known.checkpoint_step),
        "inPlace": number(known.restarts_in_place) or 0,
    }


def event(raw: Raw) -> dict[str, Any]:
    """Return an Event of Kubernetes."""
    times: Sequence[Any] = [raw.get(field) for field in ("lastTimestamp", "eventTime", "firstTimestamp")]
    return {
        "time": next((name(time) for time in times if time), ""),
        "type": name(raw.get("type")),
        "reason": name(raw.get("reason")),
        "about": name(part(raw, "involvedObject", "name")),
        "message": text(raw.get("message")),
        "count": number(raw.get("count")) or 1,
    }
