"""Verbs that look at jobs on a cluster: what they ask for, how it is shown, and what one would do next."""

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import yaml

from disttrain.client import Client
from disttrain.cluster.api import ApiError
from disttrain.cluster.events import readable_events
from disttrain.cluster.remote import RemoteJob
from disttrain.commands.options import Format
from disttrain.errors import CommandError
from disttrain.output import print_stderr, show
from disttrain.terminal import is_terminal, plain, plain_lines, rendered, table
from disttrain.views import describe as page
from disttrain.views import history as past
from disttrain.views import listing
from disttrain.views.case import Why
from disttrain.views.nodes import has_no_node
from disttrain.views.why import why as answer
from disttrain_api.history import HistoryEntry
from disttrain_api.status import ConditionType


def show_jobs(client: Client, *, everywhere: bool, selector: str | None, output: Format) -> int:
    """Show the jobs of the namespace, or of all."""
    jobs = sorted(client.list(all_namespaces=everywhere, selector=selector), key=lambda job: (job.namespace, job.name))
    if output in (Format.JSON, Format.YAML):
        show(formatted(listing.as_list([job.raw for job in jobs]), output))
        return 0
    if not jobs:
        where = "any namespace" if everywhere else f"namespace {client.namespace}"
        print_stderr(f"no jobs in {where}")
        hint("disttrain init", *([] if everywhere else ["disttrain list --all-namespaces"]))
        return 0
    show_rows(jobs, namespaces=everywhere, wide=output is Format.WIDE)
    shown = next((job for job in jobs if job.phase in ("Failed", "Pending", "Restarting")), jobs[0])
    where = f" -n {shown.namespace}" if everywhere else ""
    hint(f"disttrain why {shown.name}{where}", f"disttrain logs -f {shown.name}{where}")
    return 0


def show_rows(jobs: Sequence[RemoteJob], *, namespaces: bool, wide: bool) -> None:
    """Show a table of jobs."""
    now = datetime.now(UTC)
    rows = [listing.row(job, now, namespaces=namespaces, wide=wide) for job in jobs]
    show(rendered(table(listing.headings(namespaces=namespaces, wide=wide), rows)))


def show_job(client: Client, name: str, output: Format) -> int:
    """Show one job: as a row, or as the API server holds it."""
    job = client.get(name)
    if output in (Format.JSON, Format.YAML):
        show(formatted(listing.without_noise(job.raw), output))
        return 0
    show_rows([job], namespaces=False, wide=output is Format.WIDE)
    hint(*_next_of(job))
    return 0


def show_page(client: Client, name: str) -> int:
    """Show everything that is known of a job."""
    job = client.get(name)
    pods, now = client.pods(job), datetime.now(UTC)
    width = max(len(key) for key, _ in page.heading(job, now)) + 2
    show("\n".join(f"{key + ':':<{width}} {value}" for key, value in page.heading(job, now)))
    drawn = page.mesh_lines(job, pods)
    if drawn:
        show("\nMesh (● runs, ○ waits, ✓ ended well, ✗ failed, · no pod)\n" + "\n".join(f"  {line}" for line in drawn))
    if job.status.attempts:
        rows = [page.attempt_row(attempt, now) for attempt in job.status.attempts]
        show(rendered("", table(page.ATTEMPT_HEADINGS, rows)))
    if pods:
        show(rendered("", table(page.POD_HEADINGS, page.pod_rows(job, pods, now))))
    events = readable_events(client, job)[-10:]
    if events:
        show(rendered("", table(listing.EVENT_HEADINGS, [listing.event_row(event, now) for event in events])))
    hint(*_next_of(job))
    return 0


def show_events(client: Client, name: str, output: Format) -> int:
    """Show the Events on a job and on its pods, oldest first."""
    job = client.get(name)
    events = client.events(job)
    for pod in client.pods(job)[:_PODS_ASKED]:
        events += client.events_of(job.namespace, str(pod["metadata"]["uid"]))
    events.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    if output in (Format.JSON, Format.YAML):
        show(formatted(listing.as_list(events), output))
        return 0
    if not events:
        print_stderr(f"no events on {job.namespace}/{job.name}: the API server keeps them for an hour, as a rule")
    else:
        now = datetime.now(UTC)
        show(rendered(table(listing.EVENT_HEADINGS, [listing.event_row(event, now) for event in events])))
    hint(f"disttrain why {job.name}")
    return 0


_PODS_ASKED = 32


def show_history(client: Client, name: str | None, *, everywhere: bool, output: Format) -> int:
    """Show finished jobs, the last finished first: those of a name, or all."""
    entries = [entry for entry in client.history(all_namespaces=everywhere) if name in (None, entry.name)]
    if output in (Format.JSON, Format.YAML):
        items = [entry.model_dump(by_alias=True, exclude_none=True) for entry in entries]
        show(formatted({"items": items}, output))
        return 0
    if not entries:
        where = "any namespace" if everywhere else f"namespace {client.namespace}"
        print_stderr(f"no finished jobs{f' called {plain(name)}' if name else ''} are known of {where}")
        hint("disttrain list")
        return 0
    wide, now = output is Format.WIDE, datetime.now(UTC)
    rows = [past.row(entry, now, namespaces=everywhere, wide=wide) for entry in entries]
    show(rendered(table(past.headings(namespaces=everywhere, wide=wide), rows)))
    hint(f"disttrain why {entries[0].name}" + (f" -n {entries[0].namespace}" if everywhere else ""))
    return 0


def show_why(client: Client, name: str, output: Format) -> int:
    """Explain the state of a job, and what to do."""
    found = _why(client, name)
    if output in (Format.JSON, Format.YAML):
        show(formatted({"why": found.paragraph, "whatToDo": list(found.todo), "next": list(found.next)}, output))
        return 0
    show(plain_lines(found.paragraph))
    if found.todo:
        show(plain_lines("\nWhat to do: " + " ".join(f"{sentence}." for sentence in found.todo)))
    hint(*found.next)
    return 0


def _why(client: Client, name: str) -> Why:
    try:
        job = client.get(name)
    except ApiError as error:
        entry = _deleted(client, name) if error.status == 404 else None
        if entry is None:
            raise
        return Why(past.paragraph(entry, datetime.now(UTC)), next=(f"disttrain history {name} -o wide",))
    pods = client.pods(job)
    events = readable_events(client, job)
    unstarted = next((pod for pod in pods if (pod.get("status") or {}).get("phase") == "Pending"), None)
    if unstarted is not None:
        events += readable_events(client, job, str(unstarted["metadata"]["uid"]))
    return answer(job, pods, events, datetime.now(UTC), _nodes(client) if any(map(has_no_node, pods)) else ())


def _nodes(client: Client) -> Sequence[dict[str, Any]]:
    """Return the cluster's nodes; none where they may not be read."""
    with suppress(ApiError):
        return client.api.items("/api/v1/nodes", what="cannot list nodes")
    return ()


def _deleted(client: Client, name: str) -> HistoryEntry | None:
    """Return what is known of a job that is gone; None where that is nothing, or may not be read."""
    with suppress(ApiError):
        return next((entry for entry in client.history() if entry.name == name), None)
    return None


def _next_of(job: RemoteJob) -> list[str]:
    """Return the suggested next step for a job in this state."""
    name = job.name
    if job.holds(ConditionType.COMPLETE):
        return [f"disttrain logs {name}", f"disttrain delete {name}"]
    if job.holds(ConditionType.FAILED):
        return [f"disttrain why {name}", f"disttrain logs {name}"]
    if job.holds(ConditionType.SUSPENDED):
        return [f"disttrain resume {name}"]
    if job.holds(ConditionType.RUNNING):
        return [f"disttrain logs -f {name}", f"disttrain top {name}"]
    return [f"disttrain why {name}"]


def formatted(value: Any, output: Format) -> str:
    """Return an object as JSON or YAML, in ASCII: no character of it can mean anything to a terminal."""
    if output is Format.JSON:
        return json.dumps(value, indent=2)
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    return str(yaml.dump(value, Dumper=dumper, sort_keys=False, width=120)).rstrip("\n")


def hint(*commands: str) -> None:
    """Say what one would do next, to a person alone: a pipe gets the result and nothing else."""
    if commands and is_terminal():
        print_stderr("\nNext: " + "   ".join(plain(command) for command in commands))


def refuse_unfinished(job: RemoteJob, verb: str) -> None:
    """Raise CommandError where a verb makes no sense for a job that has finished."""
    if job.finished:
        raise CommandError(
            f"{job.namespace}/{job.name} has finished ({job.phase}) and never starts again: cannot {verb} it; submit it"
            " again under another name, or delete it first"
        )
