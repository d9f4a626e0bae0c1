"""Verbs that change jobs on a cluster."""

from typing import Annotated

import typer

from disttrain.commands.options import MANIFEST, Context, JobName, Namespace


def submit(
    file: Annotated[str, MANIFEST],
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NAME", help="(default: the manifest's, else the context's)"),
    ] = None,
    context: Context = None,
    wait: Annotated[bool, typer.Option("--wait", help="follow the job until it has finished")] = False,
) -> int:
    """Check a manifest and create the job on a cluster."""
    from disttrain.submit import submit

    return submit(file, namespace=namespace, context=context, wait=wait)


def suspend(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[bool, typer.Option("--wait", help="wait until all pods have ended")] = False,
) -> int:
    """Stop a job's pods after a checkpoint. `resume` continues from it."""
    from disttrain.change import suspend
    from disttrain.client import Client

    return suspend(Client(namespace=namespace, context=context), name, wait=wait)


def resume(name: JobName, namespace: Namespace = None, context: Context = None) -> int:
    """Resume a suspended job from its last checkpoint."""
    from disttrain.change import resume
    from disttrain.client import Client

    return resume(Client(namespace=namespace, context=context), name)


def checkpoint(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="wait until the checkpoint is complete")] = True,
) -> int:
    """Have a running job write a checkpoint now, between two that are due."""
    from disttrain.change import checkpoint
    from disttrain.client import Client

    return checkpoint(Client(namespace=namespace, context=context), name, wait=wait)


def restart(name: JobName, namespace: Namespace = None, context: Context = None) -> int:
    """Start a new attempt: suspend the job, wait until its pods have written a checkpoint and ended, and resume it."""
    from disttrain.change import restart
    from disttrain.client import Client

    return restart(Client(namespace=namespace, context=context), name)


def delete(
    names: Annotated[list[str], typer.Argument(metavar="JOB", help="names of jobs", show_default=False)],
    namespace: Namespace = None,
    context: Context = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="do not ask, even if a job has not finished")] = False,
) -> int:
    """Delete jobs and their pods. `storage.retentionPolicy.whenDeleted` decides whether checkpoints stay."""
    from disttrain.change import delete
    from disttrain.client import Client

    return delete(Client(namespace=namespace, context=context), names, yes=yes)
