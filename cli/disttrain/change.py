"""Verbs that change jobs on a cluster."""

from collections.abc import Sequence

from disttrain.checkpoint_request import wait_for_checkpoint
from disttrain.client import Client
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain.jobs import hint, refuse_unfinished
from disttrain.output import ask, print_stderr, show
from disttrain_api.names import SHORT_NAME
from disttrain_api.status import ConditionType


def suspend(client: Client, name: str, *, wait: bool) -> int:
    """Let the job's pods write a checkpoint and stop."""
    job = client.get(name)
    refuse_unfinished(job, "suspend")
    if job.suspend:
        show(f"{_named(job)} is suspended already")
    else:
        job = client.suspend(name)
        show(f"{_named(job)} is being suspended: its pods write a checkpoint and stop")
    if wait:
        job = _until(client, job, ConditionType.SUSPENDED)
        show(f"{_named(job)} is suspended{_saved(job)}")
    hint(f"disttrain resume {name}")
    return 0


def resume(client: Client, name: str) -> int:
    """Resume a suspended job."""
    job = client.get(name)
    refuse_unfinished(job, "resume")
    if not job.suspend:
        show(f"{_named(job)} is not suspended")
    else:
        show(f"{_named(client.resume(name))} goes on{_saved(job)}")
    hint(f"disttrain logs -f {name}")
    return 0


def checkpoint(client: Client, name: str, *, wait: bool) -> int:
    """Have the job write a checkpoint now."""
    job = client.checkpoint(name)
    show(f"{_named(job)} is asked for a checkpoint: it follows a step within about 20 seconds")
    if wait:
        written = wait_for_checkpoint(client, job, show)
        show(f"the checkpoint of step {written.step} is complete: {written.path}")
    return 0


def restart(client: Client, name: str) -> int:
    """Suspend the job, wait until its pods have ended, and resume it: a new attempt from a fresh checkpoint.

    The operator knows no restart of its own; this one loses no step and counts as none of the job's restarts.
    """
    job = client.get(name)
    refuse_unfinished(job, "restart")
    if not job.suspend:
        job = client.suspend(name)
        show(f"{_named(job)} is being suspended: its pods write a checkpoint and stop")
        try:
            job = _until(client, job, ConditionType.SUSPENDED)
        except (CommandError, KeyboardInterrupt):
            print_stderr(f"the job stays suspended: `disttrain resume {name}` resumes it")
            raise
    client.resume(name)
    show(f"{_named(job)} goes on{_saved(job)}")
    hint(f"disttrain logs -f {name}")
    return 0


def delete(client: Client, names: Sequence[str], *, yes: bool) -> int:
    """Delete jobs, after asking on a terminal. Their pods go with them; checkpoints stay as `storage` says."""
    jobs = [client.get(name) for name in names]
    running = [job for job in jobs if not job.finished]
    if running and not yes:
        listed = ", ".join(_named(job) for job in running)
        verb = "has not finished" if len(running) == 1 else "have not finished"
        answer = ask(f"{listed} {verb}. Delete with all pods?")
        if answer is None:
            raise CommandError(f"{listed} {verb}: --yes deletes without asking")
        if not answer:
            print_stderr("nothing was deleted")
            return 1
    for job in jobs:
        client.delete(job.name)
        show(f"{_named(job)} deleted from namespace {job.namespace}")
    hint("disttrain list")
    return 0


def _until(client: Client, job: RemoteJob, type_: ConditionType) -> RemoteJob:
    """Return the job once the condition holds. Raises CommandError where it finishes before."""
    now = job
    for now in client.follow(job.name):
        if now.holds(type_):
            return now
    raise CommandError(f"{_named(now)} finished before it was suspended ({now.phase}); `disttrain why {now.name}`")


def _named(job: RemoteJob) -> str:
    return f"{SHORT_NAME}/{job.name}"


def _saved(job: RemoteJob) -> str:
    checkpoint = job.status.checkpoint
    return f", from the checkpoint of step {checkpoint.step}" if checkpoint is not None else ""
