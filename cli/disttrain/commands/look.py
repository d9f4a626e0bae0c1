"""Verbs that look at jobs on a cluster."""

from typing import Annotated

import typer

from disttrain.commands.options import Context, Format, JobName, Namespace, Output

_Attempt = Annotated[
    int | None, typer.Option("--attempt", metavar="N", min=1, help="number of the attempt (default: the current one)")
]


def list_(
    namespace: Namespace = None,
    context: Context = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")] = False,
    selector: Annotated[
        str | None, typer.Option("-l", "--selector", metavar="LABELS", help="for example team=vision")
    ] = None,
    output: Output = Format.TABLE,
) -> int:
    """List jobs, with their progress."""
    from disttrain.client import Client
    from disttrain.jobs import show_jobs

    client = Client(namespace=namespace, context=context)
    return show_jobs(client, everywhere=everywhere, selector=selector, output=output)


def get(name: JobName, namespace: Namespace = None, context: Context = None, output: Output = Format.TABLE) -> int:
    """Show a job: as a row, or with -o yaml as the API server stores it."""
    from disttrain.client import Client
    from disttrain.jobs import show_job

    return show_job(Client(namespace=namespace, context=context), name, output)


def describe(name: JobName, namespace: Namespace = None, context: Context = None) -> int:
    """Show a job in detail: mesh, attempts with their verdicts, pods, events."""
    from disttrain.client import Client
    from disttrain.jobs import show_page

    return show_page(Client(namespace=namespace, context=context), name)


def events(name: JobName, namespace: Namespace = None, context: Context = None, output: Output = Format.TABLE) -> int:
    """Show the Events on a job and its pods, oldest first."""
    from disttrain.client import Client
    from disttrain.jobs import show_events

    return show_events(Client(namespace=namespace, context=context), name, output)


def history(
    name: Annotated[
        str | None, typer.Argument(metavar="JOB", help="jobs of this name (default: all)", show_default=False)
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")] = False,
    output: Output = Format.TABLE,
) -> int:
    """List what finished jobs came to, the last finished first: also jobs that are deleted by now."""
    from disttrain.client import Client
    from disttrain.jobs import show_history

    client = Client(namespace=namespace, context=context)
    return show_history(client, name, everywhere=everywhere, output=output)


def why(name: JobName, namespace: Namespace = None, context: Context = None, output: Output = Format.TABLE) -> int:
    """Explain why a job is pending, slow, restarting or failed, and what to do."""
    from disttrain.client import Client
    from disttrain.jobs import show_why

    return show_why(Client(namespace=namespace, context=context), name, output)


def logs(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="follow, through pending pods and restarts, to the job's end")
    ] = False,
    rank: Annotated[
        str | None, typer.Option("--rank", metavar="RANKS", help="0, 0,3 or 4-7 (default: all, and servers)")
    ] = None,
    attempt: _Attempt = None,
    tail: Annotated[
        int | None, typer.Option("--tail", metavar="N", min=0, help="the last lines of each pod (default: all)")
    ] = None,
) -> int:
    """Show the logs of a job's ranks in the order of time, each line with its rank."""
    from disttrain.client import Client
    from disttrain.logs.show import show_logs

    client = Client(namespace=namespace, context=context)
    return show_logs(client, name, ranks=rank, attempt=attempt, tail=tail, follow=follow)


def stacks(
    name: JobName,
    namespace: Namespace = None,
    context: Context = None,
    rank: Annotated[
        str | None,
        typer.Option("--rank", metavar="RANKS", help="all threads of 0, 0,3 or 4-7 (default: a line for each)"),
    ] = None,
    output: Output = Format.TABLE,
) -> int:
    """Show where the ranks of a running job are at the moment: the calls of each, the innermost first."""
    from disttrain.client import Client
    from disttrain.stacks.show import show_stacks

    return show_stacks(Client(namespace=namespace, context=context), name, ranks=rank, output=output)


def doctor(namespace: Namespace = None, context: Context = None) -> int:
    """Check that a cluster has what jobs need: version, definition, stored jobs, rights, operator, nodes, images."""
    from disttrain.client import Client
    from disttrain.doctor import doctor

    return doctor(lambda: Client(namespace=namespace, context=context))


def top(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="JOB", help="(default: all of the namespace)", show_default=False)
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.5, help="seconds between updates")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one snapshot, also on a terminal")] = False,
) -> int:
    """Show jobs as a live table with their progress, until Ctrl-C or until all have finished."""
    from disttrain.client import Client
    from disttrain.top import top

    client = Client(namespace=namespace, context=context)
    return top(client, names or [], everywhere=everywhere, interval=interval, once=once)
