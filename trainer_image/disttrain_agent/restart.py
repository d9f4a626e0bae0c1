"""Whether ranks start again in their pods after a failure, or the pods end and the operator judges them. Pure."""

from dataclasses import dataclass, replace

from disttrain_api.backoff import backoff_seconds
from disttrain_api.names import PERMANENT, ExitCode, Reason, exit_reason
from disttrain_api.report import FailureSignature, RankFailure

# Another node may have what is missing here, or another attempt does what this one may not.
_NEEDS_ANOTHER_POD = frozenset(
    {
        ExitCode.FENCED,
        ExitCode.EVALUATION_ABORTED,
        ExitCode.PORT_IN_USE,
        ExitCode.DISK_FULL,
        ExitCode.NETWORK_FAULTY,
        ExitCode.STOPPED,
    }
)


_LEAST_STEPS = 10
"""Steps that ranks must have kept in memory to have restarts anew: one that fails every few steps gains nothing."""


@dataclass(frozen=True)
class Limits:
    """How often ranks may start again in their pod."""

    restarts: int
    """Without a new checkpoint between them."""
    backoff_seconds: int
    """Pause before the second of them, doubled for each further one."""


@dataclass(frozen=True)
class Kept:
    """What the ranks that have ended have gained, and those before them."""

    checkpoint: int | None = None
    """Step of the newest checkpoint that they have reported. None: of none."""
    began: int | None = None
    """The step after which they went on, from a checkpoint or from memory. None: nobody has said so."""


@dataclass(frozen=True)
class Failure:
    """How the ranks of a job have ended, of which at least one has failed."""

    cause: RankFailure
    kept: Kept = Kept()


@dataclass(frozen=True)
class Record:
    """What the next decision needs to know of former lives of the ranks."""

    restarts: int = 0
    since_checkpoint: int = 0
    """Restarts without a new checkpoint between them, and without steps that were kept in memory."""
    checkpoint: int | None = None
    """Step of the newest checkpoint at the last restart."""
    began: int | None = None
    """The step after which a life of the ranks went on, the last time that the count began anew."""
    signature: FailureSignature | None = None
    """The last failure since that checkpoint with a signature had this one."""
    out_of_memory: bool = False
    """A rank has run out of memory since that checkpoint."""


@dataclass(frozen=True)
class Restart:
    """Start all ranks again, after a pause."""

    pause_seconds: int
    record: Record


@dataclass(frozen=True)
class Leave:
    """End the pod."""

    why: str
    repeated: bool = False
    """The same failure came again, and nothing was gained in between."""


def after(failure: Failure, record: Record, limits: Limits) -> Restart | Leave:
    """Return what follows from a failure in a pod that nobody has asked to stop."""
    if (why := hopeless(failure.cause)) is not None:
        return Leave(why)
    record = _renewed(record, failure.kept)
    signature = failure.cause.signature
    if signature is not None and signature.repeats(record.signature):
        return Leave(f"{signature.error} came again, and no step was done in between", repeated=True)
    out_of_memory = failure.cause.reason == Reason.OOM_KILLED
    if out_of_memory and record.out_of_memory:
        return Leave("a rank has run out of memory again, without a new checkpoint in between")
    if record.since_checkpoint >= limits.restarts:
        return Leave(f"{record.since_checkpoint} restarts in place without a new checkpoint are used up")
    count = record.since_checkpoint + 1
    next_record = Record(
        restarts=record.restarts + 1,
        since_checkpoint=count,
        checkpoint=record.checkpoint,
        began=record.began,
        signature=signature or record.signature,
        out_of_memory=out_of_memory or record.out_of_memory,
    )
    return Restart(backoff_seconds(count, limits.backoff_seconds), next_record)


def after_loss(kept: Kept, record: Record) -> Restart:
    """Return what follows where a lost pod has a replacement. The operator has counted it, and made its pause."""
    record = _renewed(record, kept)
    return Restart(0, replace(record, restarts=record.restarts + 1))


def _renewed(record: Record, kept: Kept) -> Record:
    """The record, without what was before a newer checkpoint; and with no restarts since then where ranks went on from
    steps further on, which were kept in memory."""
    checkpoint, began = kept.checkpoint, kept.began
    if checkpoint is not None and (record.checkpoint is None or checkpoint > record.checkpoint):
        # Who goes on from this checkpoint has gained nothing more.
        reached = max(step for step in (checkpoint, began, record.began) if step is not None)
        return Record(record.restarts, checkpoint=checkpoint, began=reached)
    if began is None or (record.began is not None and began < record.began + _LEAST_STEPS):
        return record
    return replace(record, since_checkpoint=record.since_checkpoint if record.began is None else 0, began=began)


def hopeless(cause: RankFailure) -> str | None:
    """Return why ranks that start again in this pod would fail again, or may not; None: they may."""
    code = cause.exit_code
    if code in PERMANENT:
        return f"{exit_reason(ExitCode(code))} is final"
    if code in _NEEDS_ANOTHER_POD:
        return f"{exit_reason(ExitCode(code))} is not for this pod to repair"
    return None
