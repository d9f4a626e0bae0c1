"""`spec.runPolicy`: how a job lives and ends."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.backoff import MAX_BACKOFF_SECONDS
from disttrain_api.base import ApiModel
from disttrain_api.names import Role
from disttrain_api.scheduling import SchedulingPolicy

MAX_RESTARTS = 1000
LEAST_PROGRESS_DEADLINE_SECONDS = 10
PositiveSeconds = Annotated[int, Field(ge=1, le=2**31 - 1)]


class RestartPolicy(StrEnum):
    """What a failed rank means."""

    GANG = "Gang"
    NEVER = "Never"


class RestartStrategy(StrEnum):
    """How ranks start again after a failure that may be met by a restart."""

    RECREATE = "Recreate"
    IN_PLACE = "InPlace"


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when the job has finished."""

    RUNNING = "Running"
    ALL = "All"
    NONE = "None"


class PodSecurity(StrEnum):
    """Whether the operator fills in a security context."""

    RESTRICTED = "Restricted"
    TEMPLATE = "Template"


class FailureAction(StrEnum):
    """What follows from the failure of a pod."""

    FAIL_JOB = "FailJob"
    RESTART_GANG = "RestartGang"
    RESTART_POD = "RestartPod"
    IGNORE = "Ignore"
    RESTART_WITHOUT_COUNTING = "RestartWithoutCounting"


class ExitCodeOperator(StrEnum):
    """Whether the exit code must be one of the values, or none of them."""

    IN = "In"
    NOT_IN = "NotIn"


class OnExitCodes(ApiModel):
    """Exit codes of a container that failed, as in a Job."""

    container_name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """`trainer`, or an init container that is no sidecar. Absent: whichever failed."""
    operator: ExitCodeOperator
    """In: one of the values. NotIn: an exit code that is none of them."""
    values: Annotated[list[Annotated[int, Field(ge=0, le=255)]], Field(min_length=1, max_length=255)]
    """Exit codes."""


class OnPodCondition(ApiModel):
    """A condition that the pod has."""

    type: Annotated[str, Field(min_length=1, max_length=316)]
    """Its type, for example DisruptionTarget."""
    status: Annotated[str, Field(pattern="^(True|False|Unknown)$")] = "True"
    """Its status."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Its reason. Absent: any."""


class FailureRule(ApiModel):
    """Matches a failed pod if all given fields match; without fields, every failed pod."""

    name: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Named in the status when the rule decides."""
    action: FailureAction
    """FailJob, RestartGang, RestartPod (that pod alone, with its old name; not counted if the cluster ended it), Ignore
    (the others continue), or RestartWithoutCounting (the gang, never counted by maxRestarts)."""
    roles: Annotated[list[Role], Field(min_length=1, max_length=2)] | None = None
    """Roles of the pod. Absent: any."""
    on_exit_codes: OnExitCodes | None = None
    """Exit code of the container `trainer`, or of an init container. Absent: any, or none."""
    signals: Annotated[list[Annotated[int, Field(ge=1, le=64)]], Field(min_length=1, max_length=64)] | None = None
    """Signals that ended that container. Absent: any, or none."""
    reasons: Annotated[list[Annotated[str, Field(max_length=128)]], Field(min_length=1, max_length=32)] | None = None
    """Reasons as in the verdict of an attempt: OOMKilled, Evicted, NodeLost, RankFailed … Absent: any."""
    on_pod_conditions: Annotated[list[OnPodCondition], Field(min_length=1, max_length=20)] | None = None
    """The pod has at least one of these. Absent: any, or none."""


class FailurePolicy(ApiModel):
    """Reaction to failures; the first rule that matches the pod decides."""

    rules: Annotated[list[FailureRule], Field(min_length=1, max_length=32)]
    """In order. If no rule matches: the trainer's permanent exit codes fail the job; what the cluster ends restarts the
    gang without counting; everything else restarts it."""


class SuccessOperator(StrEnum):
    """How many pods of the role must succeed."""

    ALL = "All"
    ANY = "Any"
    FIRST = "First"


class SuccessPolicy(ApiModel):
    """When the job is complete; pods that still run are then stopped."""

    role: Role = Role.WORKER
    """The role whose pods decide."""
    operator: SuccessOperator = SuccessOperator.ALL
    """All pods of the role, Any one, or the First (index 0) must succeed."""


class NodeSuspicion(ApiModel):
    """When a node is suspected: pods of later attempts then prefer other nodes."""

    failures: Annotated[int, Field(ge=0, le=10)] = 2
    """Attempts that failed first on the node. 0: never suspect a node."""
    window_seconds: PositiveSeconds = 21_600
    """Within this time."""
    stragglers: bool = True
    """Also suspect the node of a rank that was found to be slow three times, unless that rank is slow on other nodes,
    too."""


class DisruptionBudget(ApiModel):
    """A PodDisruptionBudget for the job's pods. It can block drains of nodes."""

    min_available: Annotated[int, Field(ge=1, le=20_000)]
    """Pods that must stay when others are evicted."""


class RunPolicy(ApiModel):
    """Restarts, failures, and the end."""

    restart_policy: RestartPolicy = RestartPolicy.GANG
    """Gang recreates all pods when a rank fails; Never fails the job."""
    restart_strategy: RestartStrategy = RestartStrategy.RECREATE
    """InPlace first starts all ranks again in their pods, up to `maxRestarts` times without a new checkpoint, and
    recreates lost pods alone. A `command` needs disttrain in its image."""
    max_restarts: Annotated[int, Field(ge=0, le=MAX_RESTARTS)] = 3
    """Restarts without a new checkpoint between them before the job fails. InPlace: as many of its ranks, and of lost
    pods, before."""
    restart_backoff_seconds: Annotated[int, Field(ge=0, le=MAX_BACKOFF_SECONDS)] = 10
    """Pause before the second restart without a new checkpoint between them; doubled for each further one, up to an
    hour."""
    failure_policy: FailurePolicy | None = None
    """Reaction to each failure. Absent: the defaults."""
    success_policy: SuccessPolicy = SuccessPolicy()
    """When the job is complete."""
    node_suspicion: NodeSuspicion = NodeSuspicion()
    """When later attempts avoid a node."""
    starting_deadline_seconds: PositiveSeconds | None = None
    """Time from the creation of an attempt's pods until all of them run, before the job fails. Absent: no limit."""
    progress_deadline_seconds: Annotated[int, Field(ge=LEAST_PROGRESS_DEADLINE_SECONDS, le=2**31 - 1)] | None = None
    """Time without a new step, while ranks train, before the gang restarts; longer than between two log lines. Below
    60: once a rank seems to hang, else 60 s. With InPlace a certain hang has 60 s or five of the longest steps,
    whichever is more, within this. Other phases have more time. A command of your own is judged once it has reported a
    step. Absent: no limit."""
    termination_timeout_seconds: PositiveSeconds = 60
    """Longest time for a pod to end after its grace period, or on a dead node after its deletion, before it is
    force-deleted."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Which pods are deleted when the job has finished: those still Running, All, or None."""
    failure_log_in_status: bool = False
    """True puts the last output of the first failure into status and Events, readable without the right to read
    logs."""
    pod_security: PodSecurity = PodSecurity.RESTRICTED
    """Restricted adds a restricted security context (uid 65532) if the template has none; Template adds none, for an
    image that must run as root."""
    disruption_budget: DisruptionBudget | None = None
    """Absent: none, so that nodes can be drained."""
    scheduling_policy: SchedulingPolicy = SchedulingPolicy()
    """How the pods of a gang are placed."""
