"""The verb that serves web pages."""

from pathlib import Path
from typing import Annotated

import typer

from disttrain.commands.options import Context, Namespace


def dashboard(
    runs: Annotated[Path, typer.Option("--runs", metavar="FOLDER", help="folder of the runs of this machine")] = Path(
        "disttrain-runs"
    ),
    cluster: Annotated[
        bool, typer.Option("--cluster", help="show the jobs of a cluster; -n, -A and --context say this, too")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    everywhere: Annotated[bool, typer.Option("-A", "--all-namespaces", help="jobs of all namespaces")] = False,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=0, max=65535, help="port on 127.0.0.1; 0: any")
    ] = 8470,
) -> int:
    """Serve web pages about the runs of this machine, or the jobs of a cluster, until Ctrl-C. They change nothing."""
    from disttrain.dashboard.serve import serve

    if cluster or everywhere or namespace is not None or context is not None:
        from disttrain.client import Client
        from disttrain.dashboard.cluster import ClusterJobs

        client = Client(namespace=namespace, context=context)
        return serve(ClusterJobs(client, () if everywhere else (client.namespace,)), port)
    from disttrain.dashboard.runs import LocalRuns

    return serve(LocalRuns(runs), port)
