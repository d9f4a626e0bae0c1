"""`disttrain submit job.yaml`: the job on a cluster."""

import os
import signal

from disttrain.client import Client, RemoteJob
from disttrain.output import print_stderr, show
from disttrain.terminal import plain, plain_lines, steps
from disttrain.validate import accepted
from disttrain_api.names import PERMANENT, SHORT_NAME
from disttrain_api.status import ConditionType


def submit(path: str, *, namespace: str | None, context: str | None, wait: bool) -> int:
    """Send a manifest; with `wait`, exit as the job does."""
    given = accepted(path)
    if given is None:
        return 1
    client = Client(namespace=namespace, context=context)
    job = client.submit(given)
    show(f"{SHORT_NAME}/{job.name} created in namespace {job.namespace}")
    if not wait:
        show(f"follow it with: disttrain logs -f {job.name} -n {job.namespace}")
        return 0
    # There is nothing to clean up, and the library swallows a KeyboardInterrupt that comes at the wrong moment.
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    last = ""

    def show_change(now: RemoteJob) -> None:
        nonlocal last
        line = _line(now)
        if line != last:
            show(line)
        last = line

    return _exit_code(client.wait(job.name, namespace=job.namespace, on_change=show_change))


def _line(job: RemoteJob) -> str:
    status = job.status
    parts = [f"{job.name}: {status.phase or 'Pending'}"]
    if status.attempt:
        parts.append(f"attempt {status.attempt}")
    if status.ready:
        parts.append(f"ready {status.ready}")
    if status.progress is not None:
        parts.append(f"step {steps(status.progress.step, status.progress.total_steps)}")
        if status.progress.loss is not None:
            parts.append(f"loss {status.progress.loss:.4g}")
        parts += [f"{metric.name} {metric.value:.4g}" for metric in status.progress.metrics]
    return plain("  ".join(parts))


def _exit_code(job: RemoteJob) -> int:
    """0 at success; a permanent exit code of the trainer where there is one; else 1."""
    if job.holds(ConditionType.COMPLETE):
        return 0
    failed = job.condition(ConditionType.FAILED)
    if failed is not None:
        print_stderr(f"Failed: {plain(failed.reason)}\n  {plain_lines(failed.message)}")
    verdict = job.status.attempts[-1].verdict if job.status.attempts else None
    if verdict is not None and verdict.rank is not None and verdict.exit_code in PERMANENT:
        return verdict.exit_code
    return 1
