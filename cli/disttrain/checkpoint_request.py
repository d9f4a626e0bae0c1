"""A request for a checkpoint now: which jobs take one, and what becomes of it."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain_api.names import CHECKPOINT_REQUEST, SHORT_NAME
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.report import RankPhase
from disttrain_api.status import CheckpointStatus, ConditionType, TakenRequest

if TYPE_CHECKING:
    from disttrain.client import Client

TAKEN_SECONDS = 120.0
"""In which the ranks of a job that runs take a request. The operator asks an agent every ten seconds, and in a fleet of
five thousand jobs every hundred."""


def refuse_without_checkpoints(job: RemoteJob) -> None:
    """Raise CommandError that says why where the job's ranks would write no checkpoint now."""
    spec = job.raw.get("spec") or {}
    mode = ((spec.get("parallelism") or {}).get("dataParallel") or {}).get("mode")
    if job.finished:
        why = f"it has finished ({job.phase})"
    elif not job.holds(ConditionType.RUNNING):
        why = f"it does not run ({job.phase})"
    elif spec.get("training") and not spec.get("storage"):
        # A session may keep them elsewhere, and whether there is one its agent alone knows.
        why = "it has no `storage`"
    elif mode == DataParallelMode.PARAMETER_SERVER:
        why = "with parameter servers, checkpoints are written at `training.checkpoint.interval` alone"
    else:
        return
    raise CommandError(f"{_named(job)} cannot be asked for a checkpoint: {why}")


def wait_for_checkpoint(
    client: "Client",
    asked: RemoteJob,
    tell: Callable[[str], object],
    *,
    seconds: float = TAKEN_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> CheckpointStatus:
    """Return the first checkpoint that is complete after the request. `tell` gets a sentence on what it waits for.

    asked: the job as it was stored with the request. seconds: in which ranks that run take it. Raises CommandError,
    which says what to do, where no checkpoint follows.
    """
    waits_for: str | None = None
    limit: float | None = clock() + seconds
    while True:
        for job in client.follow(asked.name, namespace=asked.namespace, look_again_at=limit):
            written = job.status.checkpoint
            if written is not None and written != asked.status.checkpoint:
                return written
            now = _waits_for(asked, job)
            if now != waits_for:
                if now is not None:
                    tell(now)
                waits_for, limit = now, clock() + seconds if now is None else None
                break
            if limit is not None and clock() >= limit:
                raise CommandError(_not_taken(job, seconds))


def _waits_for(asked: RemoteJob, job: RemoteJob) -> str | None:
    """Return the sentence on what the request waits for; None: for ranks that run to take it.

    Raises CommandError where no checkpoint follows.
    """
    if job.uid != asked.uid:
        raise CommandError(f"{_named(job)} was deleted and recreated before it wrote a checkpoint: ask again")
    if job.finished:
        raise CommandError(
            f"{_named(job)} finished before it wrote one ({job.phase}); `disttrain why {job.name}` says why"
        )
    if job.holds(ConditionType.SUSPENDED):
        raise CommandError(
            f"{_named(job)} was suspended before it wrote one: after `disttrain resume {job.name}` its ranks take the "
            "request once they train"
        )
    if job.suspend:
        return "the job is being suspended: its pods write a checkpoint and stop"
    if not job.holds(ConditionType.RUNNING):
        ended = [attempt for attempt in job.status.attempts if attempt.end_time is not None]
        if not ended:
            return f"the job does not run ({job.phase}): its ranks take the request once they train"
        last = ended[-1]
        why = f" ({last.verdict.reason})" if last.verdict is not None else ""
        return f"attempt {last.number} has ended{why}: the next one takes the request along once it trains"
    request = (asked.raw["metadata"].get("annotations") or {}).get(CHECKPOINT_REQUEST)
    if job.status.checkpoint_request == TakenRequest(value=str(request), attempt=job.status.attempt):
        return f"the ranks of attempt {job.status.attempt} have taken the request: they save after a step"
    return None


def _not_taken(job: RemoteJob, seconds: float) -> str:
    """Return the sentence on a job that runs and whose ranks take no request."""
    progress = job.status.progress
    if not job.raw["spec"].get("training") and progress is not None and progress.phase in (None, RankPhase.TRAINING):
        why = "its program has no `disttrain.session` that writes checkpoints, or one of an earlier release"
    elif progress is None or progress.phase is None:
        why = (
            "its agent does not answer the operator (an image without it, a network policy, an operator outside of the "
            "cluster), or has no report of its ranks yet"
        )
    elif progress.phase in (RankPhase.STARTING, RankPhase.RESTORING):
        why = "they have not begun to train"
    else:
        why = "the image's agent, or the operator, is of an earlier release that does not know such requests"
    return (
        f"no rank of {_named(job)} has taken the request within {seconds:g} s: {why}. The request stays: a checkpoint "
        f"follows once they take it, or when one is due; `disttrain describe {job.name}` shows the last one"
    )


def _named(job: RemoteJob) -> str:
    return f"{SHORT_NAME}/{job.name}"
