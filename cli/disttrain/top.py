"""`disttrain top`: jobs as a table with bars, looked at again every few seconds."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from disttrain.client import Client
from disttrain.cluster.api import NoAnswer
from disttrain.cluster.remote import RemoteJob
from disttrain.output import Outlet, show
from disttrain.terminal import console, duration, is_terminal, rendered, steps, table
from disttrain_api.times import parse_time

_BAR = 20
MOST = 200
"""Jobs that are shown; those that run come first."""
_ORDER = ("Running", "Restarting", "Starting", "Pending", "Suspending", "Suspended", "Failed", "Succeeded")


def top(client: Client, names: Sequence[str], *, everywhere: bool, interval: float, once: bool) -> int:
    """Show the table; on a terminal again and again until Ctrl-C, or until all jobs have finished."""
    if once or not is_terminal():
        show(rendered(_table(_jobs(client, names, everywhere), namespaces=everywhere)))
        return 0
    from rich.live import Live

    problem = ""
    jobs = _jobs(client, names, everywhere)
    screen = console(Outlet(1, "utf-8"), terminal=True)
    with Live(_table(jobs, namespaces=everywhere), console=screen, auto_refresh=False) as live:
        try:
            while not jobs or not all(job.finished for job in jobs):
                live.update(_table(jobs, namespaces=everywhere, caption=problem), refresh=True)
                time.sleep(interval)
                try:
                    jobs, problem = _jobs(client, names, everywhere), ""
                except NoAnswer as error:
                    problem = f"{error}; looking again"
        except KeyboardInterrupt:
            pass
        live.update(_table(jobs, namespaces=everywhere), refresh=True)
    screen.file.drain()
    return 0


def _jobs(client: Client, names: Sequence[str], everywhere: bool) -> list[RemoteJob]:
    jobs = [client.get(name) for name in names] if names else client.list(all_namespaces=everywhere)
    return sorted(jobs, key=lambda job: (_place(job), job.namespace, job.name))[:MOST]


def _place(job: RemoteJob) -> int:
    return _ORDER.index(job.phase) if job.phase in _ORDER else len(_ORDER)


def _table(jobs: Sequence[RemoteJob], *, namespaces: bool, caption: str = "") -> Any:
    now = datetime.now(UTC)
    headings = [*(["NAMESPACE"] if namespaces else []), "NAME", "PHASE", "PROGRESS", "STEP", "LOSS", "SAMPLES/S"]
    made = table([*headings, "RESTARTS", "LEFT"], ([*row(job, now, namespaces=namespaces)] for job in jobs))
    made.caption = caption or None
    return made


def row(job: RemoteJob, now: datetime, *, namespaces: bool) -> Iterator[str]:
    """Yield the cells of a job."""
    known = job.status.progress
    if namespaces:
        yield job.namespace
    yield job.name
    yield job.phase
    yield bar(known.step, known.total_steps) if known is not None else ""
    yield steps(known.step, known.total_steps) if known is not None else "-"
    yield f"{known.loss:.4g}" if known is not None and known.loss is not None else "-"
    rate = known.samples_per_second if known is not None else None
    yield f"{rate:,.0f}" if rate is not None else "-"
    yield str(job.status.restarts)
    yield left(job, now)


def bar(step: int, total: int) -> str:
    """Return a bar of blocks: "█████░░░░░" at one half; nothing where there is no total."""
    if total <= 0:
        return ""
    done = min(max(step, 0) * _BAR // total, _BAR)
    return "█" * done + "░" * (_BAR - done)


def left(job: RemoteJob, now: datetime) -> str:
    """Return how long the job will take at the pace of its current attempt; "-" where that is not known."""
    known, attempts = job.status.progress, job.status.attempts
    if known is None or job.finished or not attempts:
        return "-"
    began, at = parse_time(attempts[-1].running_time), parse_time(known.update_time)
    before = next((a.checkpoint_step for a in reversed(attempts[:-1]) if a.checkpoint_step is not None), 0)
    done = known.step - (before or 0)
    if began is None or at is None or at <= began or done <= 0:
        return "-"
    seconds = (at - began).total_seconds() / done * (known.total_steps - known.step) - (now - at).total_seconds()
    return duration(seconds) if seconds > 0 else "-"
