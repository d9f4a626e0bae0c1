"""Reports of ranks to their agent, and of the agent to the operator: on request, and in the termination message.

Every program of a pod can answer anything and write any termination message. So a report holds only what a status can
hold: finite numbers, integers of 64 bits, times, short texts. A value that is none of these is left out; a report that
cannot do without it is left out as a whole. A field of another version is passed by.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import core_schema

from disttrain_api.base import ApiModel
from disttrain_api.bounds import MAX_MESSAGE_BYTES, MAX_REASON_LENGTH, cut
from disttrain_api.times import parse_time, timestamp

# The kubelet cuts a termination message at 4096 bytes.
MAX_TERMINATION_MESSAGE_BYTES = 4096
MAX_METRICS = 64
MAX_ERROR_NAME = 120
MAX_PLACE = 200
MAX_SENTENCE = 500
MAX_RANKS_PER_POD = 256
MAX_AWAITED = 64
MAX_AGENT_ANSWER_BYTES = 1024 * 1024
"""The largest answer that is read from an agent: 4 KiB for each of 256 ranks."""
MAX_FIGURES_BYTES = 64 * 1024
"""The largest file of a rank's figures that is read."""
_MAX_UID = 128
_MAX_METRIC_NAME = 128
_MAX_LOG = _MAX_PATH = 4096


class _NoneInstead:
    """None in place of a value that is not sound, by pydantic's own code: with a function in Python for it, it takes
    half as long again to read an agent's answer."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.with_default_schema(handler(source), default=None, on_error="default")


def _cut(most: int) -> BeforeValidator:
    return BeforeValidator(lambda value: cut(value, most) if isinstance(value, str) else value)


def _time(value: Any) -> str:
    moment = parse_time(value)
    if moment is None:
        raise ValueError("no time")
    return timestamp(moment)


def _metrics(value: Any) -> dict[str, Any]:
    """The first of the figures that are numbers and have a name."""
    if not isinstance(value, dict):
        return {}
    sound = (
        (name, number)
        for name, number in value.items()
        if isinstance(name, str) and 0 < len(name) <= _MAX_METRIC_NAME and _is_finite(number)
    )
    return dict(pair for pair, _ in zip(sound, range(MAX_METRICS), strict=False))


def _is_finite(number: Any) -> bool:
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return -1e308 < number < 1e308


_OrNone = _NoneInstead()

_Rank = Annotated[int, Field(ge=0, le=2**31)]
_Steps = Annotated[int, Field(ge=0, le=2**53)]
_Number = Annotated[float | None, Field(allow_inf_nan=False), _OrNone]
_Code = Annotated[int, Field(ge=-(2**31), le=2**31)]
_Seconds = Annotated[float, Field(ge=0, le=2**53, allow_inf_nan=False)]
_Word = Annotated[str, _cut(MAX_REASON_LENGTH)]
_Message = Annotated[str, _cut(MAX_MESSAGE_BYTES)]
# Its end holds the cause.
_Log = Annotated[str, BeforeValidator(lambda value: value[-_MAX_LOG:] if isinstance(value, str) else value)]


class _Report(ApiModel):
    model_config = {**ApiModel.model_config, "extra": "ignore"}


class CheckpointReport(_Report):
    """A complete checkpoint."""

    step: _Steps
    path: Annotated[str, Field(max_length=_MAX_PATH)]
    time: Annotated[str, BeforeValidator(_time)]


class FailureSignature(_Report):
    """Identifies a failure that occurs again.

    Failures that come from outside, such as a lost peer, a signal or a stop, have no signature.
    """

    error: Annotated[str, Field(min_length=1, max_length=MAX_ERROR_NAME)]
    """Type of the exception; with its module, unless the type is Python's or the trainer's own."""
    place: Annotated[str, Field(max_length=MAX_PLACE)] | None = None
    """`file:line` of the innermost frame outside of torch and Python's own library. None: unknown."""
    step: _Steps | None = None
    """The last step that the job had done; for a loss that is not finite, its step. None: unknown."""
    steps_done: _Steps | None = None
    """Steps that this attempt had done before. None: unknown."""

    def repeats(self, former: "FailureSignature | None") -> bool:
        """Return whether this is `former` again: the same error at the same place, and no step further.

        Progress that only a newer checkpoint between the two shows is the caller's to look for.
        """
        if former is None or (self.error, self.place, self.step) != (former.error, former.place, former.step):
            return False
        return self.step is not None or self.steps_done == former.steps_done == 0


class RankError(_Report):
    """Why a rank ended, in its own words; `reason` is UpperCamelCase, `message` one sentence."""

    exit_code: _Code
    reason: _Word
    message: _Message
    unquoted: Annotated[_Message | None, _OrNone] = None
    """The message without what a program said, such as the text of an exception. None: it holds nothing of that."""
    signature: Annotated[FailureSignature | None, _OrNone] = None


class RankPhase(StrEnum):
    """Current activity of a rank."""

    STARTING = "Starting"
    RESTORING = "Restoring"
    """It reads a checkpoint, or what a rank that has survived has left."""
    TRAINING = "Training"
    EVALUATING = "Evaluating"
    SAVING = "Saving"
    RESTARTING = "Restarting"
    """It starts again in its pod, after a failure. No rank says this of itself: the operator concludes it."""


class PhaseSeconds(_Report):
    """How long this life of a rank was in phases that are over."""

    began: Annotated[str, BeforeValidator(_time)]
    """When its count began. Tells its lives apart."""
    restoring: _Seconds = 0
    evaluating: _Seconds = 0
    saving: _Seconds = 0


class SlowRank(_Report):
    """A rank that is slow all the time, by what it works on a step without waiting for others."""

    rank: _Rank
    seconds: _Seconds
    """Per step."""
    others_seconds: _Seconds
    """The same, as the median of the other ranks that do the same work."""
    times: Annotated[int, Field(ge=1, le=2**31)] = 1
    """How often it was found to be slow, each time in as many further windows as it took to name it."""


class RankReport(_Report):
    """A rank rewrites this file atomically at every logged step, evaluation and checkpoint, and when it ends."""

    rank: _Rank
    phase: Annotated[_Word | None, _OrNone] = None
    """A RankPhase. None: of a version that does not say, or a program whose lines are read."""
    phase_seconds: Annotated[PhaseSeconds | None, _OrNone] = None
    step: _Steps = 0
    step_time: Annotated[Annotated[str, BeforeValidator(_time)] | None, _OrNone] = None
    """When the agent saw that the rank had logged this step. None: it has logged none in this life."""
    total_steps: _Steps = 0
    began: Annotated[_Steps | None, _OrNone] = None
    """The step after which this life of the rank went on, from a checkpoint or from memory. None: not known yet."""
    loss: _Number = None
    samples_per_second: _Number = None
    loading_share: Annotated[Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None, _OrNone] = None
    """The part of the time of the last logged steps in which the rank waited for samples."""
    remaining_seconds: Annotated[_Seconds | None, _OrNone] = None
    """Until the last step, at the pace since training began or resumed."""
    skipped_steps: Annotated[_Steps | None, _OrNone] = None
    """Steps of which no update was made; None where none is skipped."""
    roll_backs: Annotated[_Steps | None, _OrNone] = None
    """How often the job was rolled back over samples that could not be used. None: never."""
    slow_rank: Annotated[SlowRank | None, _OrNone] = None
    """The rank of the job that holds up the others. Rank 0 alone knows."""
    metrics: Annotated[dict[str, float], BeforeValidator(_metrics)] = {}
    evaluation_failure: Annotated[Annotated[str, _cut(MAX_SENTENCE)] | None, _OrNone] = None
    """Why the last evaluation that was due has no figures."""
    checkpoint: Annotated[CheckpointReport | None, _OrNone] = None
    error: Annotated[RankError | None, _OrNone] = None
    done: bool = False
    """All work is finished; what happens to the process from here on is tear-down."""


class RankFailure(_Report):
    """The rank of a pod that failed first."""

    rank: _Rank
    exit_code: Annotated[_Code | None, _OrNone] = None
    signal: Annotated[Annotated[int, Field(ge=0, le=128)] | None, _OrNone] = None
    reason: Annotated[_Word | None, _OrNone] = None
    message: Annotated[_Message | None, _OrNone] = None
    unquoted: Annotated[_Message | None, _OrNone] = None
    """As in RankError."""
    signature: Annotated[FailureSignature | None, _OrNone] = None
    log_tail: Annotated[_Log | None, _OrNone] = None
    out_of_memory: Annotated[bool | None, _OrNone] = None
    """The kernel has killed a process of the pod for want of memory since its ranks last started. None: unknown."""
    repeated: Annotated[bool, BeforeValidator(lambda value: value is True)] = False
    """The same failure has come before in this pod, which has started its ranks again, and nothing was gained since."""
    not_in_place: Annotated[Annotated[str, _cut(MAX_SENTENCE)] | None, _OrNone] = None
    """Why the ranks did not start again in their pods, as the agents have decided. None: nobody had to decide."""


class RestartsInPlace(_Report):
    """How often worker 0's agent has had all ranks start again, or is about to after a pause."""

    count: Annotated[int, Field(ge=1, le=2**31 - 1)]
    time: Annotated[str, BeforeValidator(_time)]
    """When the first rank failed, the last time."""
    pause_seconds: Annotated[_Seconds | None, _OrNone] = None
    """Before the ranks start again, the last time."""
    failure: RankFailure
    """Why, the last time."""


class PodReport(_Report):
    """The agent's termination message. Rank 0's pod holds the job's progress."""

    progress: Annotated[RankReport | None, _OrNone] = None
    failure: Annotated[RankFailure | None, _OrNone] = None
    restarts_in_place: Annotated[RestartsInPlace | None, _OrNone] = None


class StepPace(_Report):
    """How long a rank that takes steps has done none, beside how long its last steps took."""

    still_seconds: _Seconds
    """Since it began or ended a step, without the time in which its agent was stopped."""
    median_seconds: _Seconds
    longest_seconds: _Seconds


class Idle(_Report):
    """How long a rank has shown no sign that it gets on: no step, batch or phase, and no bytes that it read or wrote or
    time of a processor beyond what waiting takes."""

    phase: RankPhase
    """What it does."""
    seconds: _Seconds
    """Without the time in which its agent was stopped."""
    longest_seconds: Annotated[_Seconds | None, _OrNone] = None
    """The longest such pause so far in this phase, once the phase has been over in this pod. None: it has not."""


class RankStatus(_Report):
    """A rank as its agent sees it now."""

    rank: _Rank
    pid: Annotated[Annotated[int, Field(ge=0, le=2**31)] | None, _OrNone] = None
    exit_code: Annotated[_Code | None, _OrNone] = None
    """None: it runs. Negative: the signal that ended it."""
    seconds_since_step: Annotated[_Seconds | None, _OrNone] = None
    """Since the agent saw a report with another step, or with another phase after it. None: it has seen none."""
    report: Annotated[RankReport | None, _OrNone] = None
    pace: Annotated[StepPace | None, _OrNone] = None
    """None: it does anything else than steps, has done too few of them in this life, or does not say."""
    idle: Annotated[Idle | None, _OrNone] = None
    """None: it does not say what it does."""


class AgentStatus(_Report):
    """Answer of an agent to `/v1/status`. It belongs to one attempt of one job: answers of older attempts are
    dropped."""

    job_uid: Annotated[str, Field(max_length=_MAX_UID)]
    attempt: Annotated[int, Field(ge=0, le=2**31)]
    ranks: Annotated[list[RankStatus], Field(max_length=MAX_RANKS_PER_POD)] = []
    generation: Annotated[int, Field(ge=0, le=2**31)] = 0
    """How often the ranks have started before in this attempt: more than 0 after restarts in place."""
    refused: Annotated[dict[str, int], Field(max_length=16)] = {}
    """Requests and connections that were refused, by the reason."""
    restarts_in_place: Annotated[RestartsInPlace | None, _OrNone] = None
    awaited: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(max_length=MAX_AWAITED)] = []
    """Workers whose pods worker 0's agent has lost amid a restart in place, and waits for; the first of them."""


def decode_agent_status(data: bytes) -> AgentStatus | None:
    """Return the status in an agent's answer, None where something else gave it."""
    if len(data) > MAX_AGENT_ANSWER_BYTES:
        return None
    try:
        return AgentStatus.model_validate_json(data)
    except ValueError:
        return None


class Figures(_Report):
    """Answer of an agent to `/v1/metrics`: the last logged figures of a rank, of which each rewrites a file."""

    rank: _Rank
    step: _Steps | None = None
    """None: it has logged no step in this life, or is no rank of the trainer."""
    figures: Annotated[dict[str, float], BeforeValidator(_metrics)] = {}
    """By their names in metrics.jsonl, at most 64. One that is not finite is left out."""


def encode_pod_report(report: PodReport) -> str:
    """JSON of at most MAX_TERMINATION_MESSAGE_BYTES; the log tail gives way first, then messages, then figures."""
    text = _dump(report)
    for shorter in _shorter(report):
        if len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES:
            break
        text = _dump(shorter)
    return text


def _shorter(report: PodReport) -> Iterator[PodReport]:
    """The report with less and less in it."""
    restarts = report.restarts_in_place
    for failure in _shorter_failures(restarts.failure if restarts is not None else None):
        assert restarts is not None
        report = report.model_copy(update={"restarts_in_place": restarts.model_copy(update={"failure": failure})})
        yield report
    for failure in _shorter_failures(report.failure):
        report = report.model_copy(update={"failure": failure})
        yield report
    for field, nothing in (("error", None), ("metrics", {}), ("evaluation_failure", None), ("checkpoint", None)):
        if report.progress is not None:
            report = report.model_copy(update={"progress": report.progress.model_copy(update={field: nothing})})
            yield report


def _shorter_failures(failure: RankFailure | None) -> Iterator[RankFailure]:
    for field in ("log_tail", "message", "unquoted", "not_in_place"):
        value = (getattr(failure, field) if failure is not None else None) or ""
        while failure is not None and value:
            # The end of a log and the start of a message hold the cause.
            value = value[len(value) // 4 + 1 :] if field == "log_tail" else value[: len(value) * 3 // 4]
            failure = failure.model_copy(update={field: value or None})
            yield failure


def decode_pod_report(text: str) -> PodReport | None:
    """The report in a termination message, None where another program wrote it."""
    if len(text) > MAX_TERMINATION_MESSAGE_BYTES:
        return None
    try:
        return PodReport.model_validate_json(text)
    except ValueError:
        return None


def _dump(report: PodReport) -> str:
    return report.model_dump_json(by_alias=True, exclude_none=True)


def left(step: int | None, steps: int, code: int, why: str) -> str:
    """Return the sentence on a rank that ended before its work was done.

    step: the last one that was done, of `steps`; None or 0 steps: unknown.
    """
    where = f"at step {step} of {steps}" if steps and step is not None else "before its first step"
    return f"left {where} with exit code {code} before its work was done; {why}"
