"""Rows of `disttrain history`, and a finished job in a sentence: entries and a time -> words. Pure."""

from datetime import datetime

from disttrain.terminal import age, duration, steps
from disttrain.views.goodput import share
from disttrain.views.listing import percent
from disttrain_api.history import HistoryEntry
from disttrain_api.times import parse_time

_NARROW = ("NAME", "PHASE", "REASON", "PROGRESS", "LOSS", "GOODPUT", "TOOK", "FINISHED")
_WIDE = ("MESH", "RANKS", "ATTEMPTS", "RESTARTS", "CHECKPOINT", "MESSAGE")


def headings(*, namespaces: bool, wide: bool) -> list[str]:
    """Return the columns' names."""
    return [*(["NAMESPACE"] if namespaces else []), *_NARROW, *(_WIDE if wide else [])]


def row(entry: HistoryEntry, now: datetime, *, namespaces: bool, wide: bool) -> list[str]:
    """Return the cells of a finished job; "-" stands for what is not known."""
    known, ended, created = entry.progress, parse_time(entry.completion_time), parse_time(entry.creation_time)
    cells = [
        entry.name,
        entry.phase,
        entry.reason,
        None if known is None else f"{steps(known.step, known.total_steps)}{percent(known.step, known.total_steps)}",
        None if known is None or known.loss is None else f"{known.loss:.4g}",
        None if entry.goodput is None else share(entry.goodput, now),
        None if ended is None or created is None else duration(max((ended - created).total_seconds(), 0.0)),
        None if ended is None else f"{age(ended, now)} ago",
    ]
    if wide:
        saved = None if entry.checkpoint is None else f"step {entry.checkpoint.step}"
        cells += [entry.mesh, entry.world_size, entry.attempts, entry.restarts, saved, entry.message]
    return ["-" if cell is None else str(cell) for cell in ([entry.namespace] if namespaces else []) + cells]


def paragraph(entry: HistoryEntry, now: datetime) -> str:
    """Return what became of a job that is gone."""
    ended = age(parse_time(entry.completion_time), now)
    why = f": {entry.message.rstrip('.')}" if entry.message else ""
    cause = entry.verdict.message if entry.verdict is not None and entry.phase == "Failed" else ""
    more = f" {cause.rstrip('.')}." if cause and cause not in why else ""
    return f"{entry.namespace}/{entry.name} finished {ended} ago ({entry.phase}){why}. It was deleted since then.{more}"
