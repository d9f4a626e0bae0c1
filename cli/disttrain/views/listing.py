"""Rows of `disttrain list`, `get` and `events`: raw objects and a time -> words. Pure."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from disttrain.cluster.remote import RemoteJob
from disttrain.terminal import age, steps
from disttrain_api.times import parse_time

Raw = Mapping[str, Any]

_NARROW = ("NAME", "PHASE", "MESH", "READY", "PROGRESS", "LOSS", "RESTARTS", "AGE")
_WIDE = ("ATTEMPT", "SAMPLES/S", "CHECKPOINT", "RANKS", "REASON")


def headings(*, namespaces: bool, wide: bool) -> list[str]:
    """Return the columns' names."""
    return [*(["NAMESPACE"] if namespaces else []), *_NARROW, *(_WIDE if wide else [])]


def row(job: RemoteJob, now: datetime, *, namespaces: bool, wide: bool) -> list[str]:
    """Return the cells of a job; "-" stands for what is not known."""
    status = job.status
    known = status.progress
    cells = [
        job.name,
        job.phase,
        status.mesh,
        status.ready,
        None if known is None else f"{steps(known.step, known.total_steps)}{percent(known.step, known.total_steps)}",
        None if known is None or known.loss is None else f"{known.loss:.4g}",
        status.restarts,
        age(job.created, now),
    ]
    if wide:
        rate = known.samples_per_second if known is not None else None
        cells += [
            status.attempt or None,
            None if rate is None else f"{rate:,.0f}",
            None if status.checkpoint is None else f"step {status.checkpoint.step}",
            status.world_size,
            reason(job),
        ]
    cells = [*([job.namespace] if namespaces else []), *cells]
    return ["-" if cell is None else str(cell) for cell in cells]


def percent(step: int, total: int) -> str:
    """Return " (42%)", "" where there is no total."""
    return f" ({min(100 * step // total, 100)}%)" if total > 0 else ""


def reason(job: RemoteJob) -> str | None:
    """Return the reason of the condition that says most: that of the end, else of Running."""
    for type_ in ("Complete", "Failed", "Suspended", "Running"):
        found = next((entry for entry in job.status.conditions if entry.type == type_), None)
        if found is not None and (found.status == "True" or type_ == "Running"):
            return found.reason
    return None


EVENT_HEADINGS = ("LAST SEEN", "TYPE", "REASON", "OBJECT", "MESSAGE")


def event_row(event: Raw, now: datetime) -> list[str]:
    """Return the cells of an Event."""
    about = event.get("involvedObject")
    about = about if isinstance(about, Mapping) else {}
    count = event.get("count")
    times = f" (x{count})" if isinstance(count, int) and count > 1 else ""
    return [
        age(event_time(event), now) + times,
        str(event.get("type") or "-"),
        str(event.get("reason") or "-"),
        f"{str(about.get('kind') or '-').lower()}/{about.get('name') or '-'}",
        str(event.get("message") or ""),
    ]


def event_time(event: Raw) -> datetime | None:
    """Return when it was last seen."""
    for field in ("lastTimestamp", "eventTime", "firstTimestamp"):
        moment = parse_time(event.get(field))
        if moment is not None:
            return moment
    return None


def without_noise(raw: Raw) -> dict[str, Any]:
    """Return an object as `kubectl get -o yaml` shows it: without managedFields."""
    metadata = {key: value for key, value in raw.get("metadata", {}).items() if key != "managedFields"}
    return {**raw, "metadata": metadata}


def as_list(raws: Sequence[Raw]) -> dict[str, Any]:
    """Return the objects as a List."""
    return {"apiVersion": "v1", "kind": "List", "items": [without_noise(raw) for raw in raws]}
