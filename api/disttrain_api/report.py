"""What ranks tell their agent, and what the agent tells the operator in the pod's termination message."""

from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel

# The kubelet cuts a termination message at 4096 bytes.
MAX_TERMINATION_MESSAGE_BYTES = 4096
MAX_ERROR_NAME = 120
MAX_PLACE = 200


class CheckpointReport(ApiModel):
    """A complete checkpoint."""

    step: int
    path: str
    time: str


class FailureSignature(ApiModel):
    """What makes a failure recognisable when it comes again.

    Failures that come from outside, such as a lost peer, a signal or a stop, have no signature.
    """

    error: Annotated[str, Field(min_length=1, max_length=MAX_ERROR_NAME)]
    """Type of the exception; with its module, unless the type is Python's or the trainer's own."""
    place: Annotated[str, Field(max_length=MAX_PLACE)] | None = None
    """`file:line` of the innermost frame outside of torch and Python's own library. None: unknown."""
    step: Annotated[int, Field(ge=0)] | None = None
    """The last step that the job had done; for a loss that is not finite, its step. None: unknown."""
    steps_done: Annotated[int, Field(ge=0)] | None = None
    """Steps that this attempt had done before. None: unknown."""

    def repeats(self, former: "FailureSignature | None") -> bool:
        """Return whether this is `former` again: the same error at the same place, and no step further.

        Progress that only a newer checkpoint between the two shows is the caller's to look for.
        """
        if former is None or (self.error, self.place, self.step) != (former.error, former.place, former.step):
            return False
        return self.step is not None or self.steps_done == former.steps_done == 0


class RankError(ApiModel):
    """Why a rank ended, in its own words; `reason` is UpperCamelCase, `message` one sentence."""

    exit_code: int
    reason: str
    message: str
    signature: FailureSignature | None = None


class RankReport(ApiModel):
    """A rank rewrites this file atomically at every logged step, evaluation and checkpoint, and when it ends."""

    rank: int
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    samples_per_second: float | None = None
    metrics: dict[str, float] = {}
    checkpoint: CheckpointReport | None = None
    error: RankError | None = None
    done: bool = False
    """All work is finished; what happens to the process from here on is tear-down."""


class RankFailure(ApiModel):
    """The rank of a pod that failed first."""

    rank: int
    exit_code: int | None = None
    signal: int | None = None
    reason: str | None = None
    message: str | None = None
    signature: FailureSignature | None = None
    log_tail: str | None = None


class PodReport(ApiModel):
    """The agent's termination message. Rank 0's pod holds the job's progress."""

    progress: RankReport | None = None
    failure: RankFailure | None = None


def encode_pod_report(report: PodReport) -> str:
    """JSON of at most MAX_TERMINATION_MESSAGE_BYTES; the log tail gives way first, then the message."""
    text = _dump(report)
    if report.failure is None or len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES:
        return text
    for field in ("log_tail", "message"):
        value = getattr(report.failure, field) or ""
        while value and len(text.encode()) > MAX_TERMINATION_MESSAGE_BYTES:
            # The end of a log and the start of a message hold the cause.
            value = value[len(value) // 4 + 1 :] if field == "log_tail" else value[: len(value) * 3 // 4]
            failure = report.failure.model_copy(update={field: value or None})
            report = report.model_copy(update={"failure": failure})
            text = _dump(report)
    return text


def decode_pod_report(text: str) -> PodReport | None:
    """The report in a termination message, None where another program wrote it."""
    try:
        return PodReport.model_validate_json(text)
    except ValueError:
        return None


def _dump(report: PodReport) -> str:
    return report.model_dump_json(by_alias=True, exclude_none=True)
