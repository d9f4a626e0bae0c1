"""`status` of a DistTrainingJob. Conditions are the truth; `phase` is one word for people and read by no decision.

Another version of the operator may have written it, or may read it next. So its words are open strings, which code
compares with the constants below, and fields that this version does not know are kept and written back.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel

Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class StatusModel(ApiModel):
    """A part of the status. Fields of another version are kept."""

    model_config = {**ApiModel.model_config, "extra": "allow"}


class ConditionType(StrEnum):
    """All of them are set at the first status write. Conditions of other types are left as they are."""

    RUNNING = "Running"
    SUSPENDED = "Suspended"
    RESTARTING = "Restarting"
    COMPLETE = "Complete"
    FAILED = "Failed"
    FINISHED = "Finished"
    STRAGGLING = "Straggling"
    HANG_SUSPECTED = "HangSuspected"


class Phase(StrEnum):
    """Derived from the conditions, for the eye."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


class Condition(StatusModel):
    """A Kubernetes condition."""

    type: str
    """Running, Suspended, Restarting, Complete, Failed, Finished, Straggling or HangSuspected."""
    status: Annotated[str, Field(json_schema_extra={"pattern": "^(True|False|Unknown)$"})]
    """True, False or Unknown."""
    reason: str
    """For programs."""
    message: str
    """A sentence for people."""
    last_transition_time: Time
    """When `status` last changed."""
    observed_generation: int
    """The generation of the job that this was derived from."""


class ReplicaStatus(StatusModel):
    """Counts of the current attempt's pods of one role."""

    role: str
    """worker or ps."""
    active: int = 0
    """Pods that exist and have not ended."""
    ready: int = 0
    """Pods whose trainer container runs."""
    succeeded: int = 0
    """Pods that ended with exit code 0."""
    failed: int = 0
    """Pods that ended otherwise."""


class Metric(StatusModel):
    """A named figure of the last evaluation."""

    name: str
    """For example accuracy or loss."""
    value: float
    """Its value."""


class Progress(StatusModel):
    """The last progress that the ranks reported."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps to do."""
    loss: float | None = None
    """Training loss of the last logged step, averaged over all ranks."""
    samples_per_second: float | None = None
    """Samples of all ranks per second, over the last logged steps."""
    loading_percent: int | None = None
    """Share of that time in which the rank waited for samples."""
    skipped_steps: int | None = None
    """Steps (with parameter servers parts of steps) of which `training.skipSteps` made no update."""
    roll_backs: int | None = None
    """How often it rolled the job back."""
    metrics: list[Metric] = []
    """Figures of the last evaluation on held-out data."""
    evaluation_failure: str | None = None
    """Why the last evaluation has no figures. Absent: it has some, or none was due."""
    phase: str | None = None
    """Starting, Restoring, Training, Evaluating, Saving or Restarting, while the job runs."""
    remaining_seconds: int | None = None
    """Time to the last step at the pace so far, while the job runs."""
    remaining: str | None = None
    """The same for people, for example 1h30m."""
    last_step_time: Time | None = None
    """When a step was last logged."""
    update_time: Time
    """When the operator learned it."""


class CheckpointStatus(StatusModel):
    """The last complete checkpoint."""

    step: int
    """Its step."""
    path: str
    """Its folder, as the pods see it."""
    time: Time
    """When it was complete."""


class TakenRequest(StatusModel):
    """The last request for a checkpoint that the ranks have taken."""

    value: str
    """Value of the annotation `disttrain.io/checkpoint-request`."""
    attempt: int
    """The attempt whose ranks have taken it."""


class FailureClass(StrEnum):
    """What kind of cause ended a pod."""

    CONFIGURATION = "Configuration"
    PROGRAM = "Program"
    OUT_OF_MEMORY = "OutOfMemory"
    OUT_OF_STORAGE = "OutOfStorage"
    KILLED = "Killed"
    DISRUPTION = "Disruption"
    NODE_LOST = "NodeLost"
    POD_LOST = "PodLost"
    STOPPED = "Stopped"
    PEER_LOST = "PeerLost"
    HANG = "Hang"
    NOT_STARTED = "NotStarted"


class Signature(StatusModel):
    """Identifies a failure that occurs again."""

    error: str
    """Type of the exception."""
    place: str | None = None
    """File and line where it was raised."""
    step: int | None = None
    """The last step that the job had done."""
    steps_done: int | None = None
    """Steps that the attempt had done before."""


class Verdict(StatusModel):
    """Why an attempt ended: the first cause, not the last symptom."""

    reason: str
    """For programs, for example OOMKilled or RankFailed."""
    message: str
    """A sentence for people."""
    class_: Annotated[str | None, Field(alias="class")] = None
    """Kind of the cause: Configuration (a restart would fail the same way), Program, OutOfMemory, OutOfStorage, Killed,
    Disruption (preempted, evicted, drained, rejected), NodeLost, PodLost, Stopped, PeerLost, Hang or NotStarted.
    Absent: nothing failed."""
    action: str | None = None
    """Action of the failure policy. Absent: nothing failed."""
    rule: str | None = None
    """Name, or index, of the failure policy's rule that decided. Absent: the default."""
    role: str | None = None
    """Role of the pod that failed first."""
    rank: int | None = None
    """Global rank that failed first."""
    pod: str | None = None
    """Its pod."""
    node: str | None = None
    """Its node."""
    exit_code: int | None = None
    """Its exit code."""
    signal: int | None = None
    """The signal that ended it."""
    signature: Signature | None = None
    """Identifies the failure: the second of two equal ones, with no step between, ends the job. Absent: it came from
    outside."""
    log: str | None = None
    """The last lines of its log, if available and `failureLogInStatus` asks for them."""


class Replacement(StatusModel):
    """A pod that was recreated alone, within an attempt."""

    pod: str
    """Its name; the new pod has the same."""
    uid: str
    """Uid of the pod that failed."""
    time: Time
    """When it was judged."""
    reason: str
    """Why it failed."""
    checkpoint_step: int | None = None
    """Step of the last complete checkpoint that was known then."""
    counted: bool = False
    """Whether it is one of `maxRestarts` lost pods that all ranks wait for."""
    step_time: Time | None = None
    """When ranks that wait for it had last logged a step."""


class Attempt(StatusModel):
    """One life of the gang."""

    number: int
    """1 for the first."""
    start_time: Time
    """When the operator began to create its pods."""
    admitted_time: Time | None = None
    """When queue or gate released its pods. Absent: neither holds them, or it still does."""
    running_time: Time | None = None
    """When all its pods ran."""
    end_time: Time | None = None
    """When it ended."""
    verdict: Verdict | None = None
    """Why it ended; before `endTime` is set, why it is ending."""
    checkpoint_step: int | None = None
    """Step of the last complete checkpoint when it ended, also where that was reported later."""
    avoided_nodes: list[str] = []
    """Suspected nodes, which its pods prefer not to use."""
    replacements: list[Replacement] = []
    """Pods that were recreated alone; the last fifty."""
    restarts_in_place: int | None = None
    """Restarts of its ranks in their pods."""
    last_restart_in_place: str | None = None
    """Why, the last time."""
    slow_node: str | None = None
    """Node of the last rank that was found to be slow three times."""
    slow_rank: int | None = None
    """This rank."""
    succeeded: str | None = None
    """Members that have succeeded, for example "worker 0-3,7"; kept of the last attempt."""


class GoodputState(StrEnum):
    """What a second of a job's time is spent on."""

    QUEUED = "Queued"
    """A queue, the gate, the scheduler or a quota held the pods back."""
    SUSPENDED = "Suspended"
    """`suspend` held the job back, or its pods were stopping for it."""
    STARTING = "Starting"
    """Pods were made and came up, or ranks prepared the training."""
    TRAINING = "Training"
    """On steps that had not been done before, as far as is known."""
    EVALUATING = "Evaluating"
    SAVING = "Saving"
    """The ranks waited for a checkpoint."""
    RESTORING = "Restoring"
    """The ranks read a checkpoint, or what a rank that has survived has left."""
    REDOING = "Redoing"
    """On steps that were done before and lost."""
    WAITING = "Waiting"
    """The pause before a restart (`restartBackoffSeconds`)."""
    RESTARTING = "Restarting"
    """From a failure until all pods ran again, but for the time in a queue or a pause; in place, until ranks trained
    again."""


class StateSeconds(StatusModel):
    """Time spent in a state."""

    state: str
    """Training, for example."""
    seconds: int
    """Whole seconds."""


class LifeOfRanks(StatusModel):
    """A life of the ranks, which measure these phases: the seconds in `spent` before it."""

    began: Time
    """By the clock of its node."""
    restoring: int
    """Seconds."""
    evaluating: int
    """Seconds."""
    saving: int
    """Seconds."""


class Goodput(StatusModel):
    """Where the job's time went. `spent` adds up to the time from `since` to `updateTime`."""

    since: Time
    """When the job was created, or an operator that counts first saw it."""
    update_time: Time
    """End of the count. Since then the job is in `state`."""
    state: str | None = None
    """Queued, Suspended, Starting, Restoring, Training, Evaluating, Saving, Redoing (lost steps), Waiting, Restarting.
    Absent: it has finished."""
    spent: list[StateSeconds] = []
    """Time by state."""
    percent: int | None = None
    """Share of Training. Absent before the first second."""
    furthest_step: int = 0
    """The furthest step that was reported; those before it are redone."""
    life: LifeOfRanks | None = None
    """The ranks' present life. Absent: no ranks have measured yet."""


class JobStatus(StatusModel):
    """What the operator observed and decided."""

    conditions: list[Condition] = []
    """Wait for `Finished`: True on success and failure."""
    phase: str | None = None
    """One word for people: Pending, Starting, Running, Restarting, Suspending, Suspended, Succeeded or Failed."""
    observed_generation: int | None = None
    """The generation of the job that this status was derived from."""
    attempt: int = 0
    """Number of the current attempt; 0 before the first."""
    restarts: int = 0
    """Restarts so far, of the gang or of single pods; resuming is none."""
    restarts_since_checkpoint: int = 0
    """Counted restarts since the last new checkpoint, but of pods that all ranks wait for; at most `maxRestarts`."""
    mesh: str | None = None
    """Degrees of the mesh, for example "pp2 x dp8"."""
    world_size: int | None = None
    """Number of ranks."""
    start_time: Time | None = None
    """When the job started or last resumed; `activeDeadlineSeconds` counts from it."""
    completion_time: Time | None = None
    """When the job finished."""
    ready: str | None = None
    """Running / all worker pods, for example "3/4"."""
    replica_statuses: list[ReplicaStatus] = []
    """Counts per role."""
    progress: Progress | None = None
    """The last progress that the ranks reported."""
    checkpoint: CheckpointStatus | None = None
    """The last complete checkpoint."""
    checkpoint_request: TakenRequest | None = None
    """The last request for a checkpoint that the ranks have taken."""
    goodput: Goodput | None = None
    """Where its time went."""
    attempts: list[Attempt] = []
    """The last ten attempts."""
