"""The answer of a policy (Transition), and the result of `decide` (Decision): a status, and the actions (Action).

Actions are plain values: no manifest, no request; each says why.
"""

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from disttrain_api.names import Role
from disttrain_api.status import JobStatus


@dataclass(frozen=True)
class CreateSupport:
    """Create what an attempt needs, where it is missing: Service, Secret, claim, PodGroup, policies."""

    attempt: int
    why: str
    tries: int = 0
    """How often it was asked for again, after the time with the pods: what is not watched is asked for once per try."""


@dataclass(frozen=True)
class CreatePod:
    """Create one pod of the gang."""

    role: Role
    index: int
    attempt: int
    why: str
    avoid: tuple[str, ...] = ()
    """Nodes that it should not run on where there are others."""
    gated: bool = False
    """No node takes it until it is released."""
    replacement: int = 0
    """Number of a pod that takes the place of a lost one while the others wait: higher than that of every former pod of
    this name. 0: the pod takes no such place."""
    dead: tuple[str, ...] = ()
    """Nodes that it must not run on: they are dead, and the scheduler may not know yet."""


@dataclass(frozen=True)
class ReleasePod:
    """Let exactly this pod go, to this node."""

    name: str
    uid: str
    node: str
    at: str
    """The time of the decision, which is written on the pod."""
    why: str


@dataclass(frozen=True)
class DeletePod:
    """Delete exactly this pod; `uid` is a precondition.

    `grace_seconds` None: the pod's own grace period; 0: by force, its node is not asked.
    """

    name: str
    uid: str
    grace_seconds: int | None
    why: str


@dataclass(frozen=True)
class RestartInPlace:
    """Have worker 0's agent restart all ranks in their pods, unless they have ended or taken a step since."""

    pod_uid: str
    """Worker 0's pod."""
    attempt: int
    generation: int
    """How often the ranks of the attempt had restarted in place."""
    step: int
    """The last that they had done."""
    rank: int | None
    """The one to kill; None: all."""
    at: datetime
    """The time of the decision."""
    why: str = field(default="", compare=False)
    """Where the ranks were, in a sentence."""


@dataclass(frozen=True)
class Order:
    """An order to restart in place, and what came of it."""

    given: RestartInPlace
    refused: str | None = None
    """Why worker 0's agent does not follow it, or is not known to. None: it does."""


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself; its uid is a precondition."""

    why: str


Action = CreateSupport | CreatePod | ReleasePod | DeletePod | RestartInPlace | DeleteJob


class State(StrEnum):
    """State of a job. Conditions and phase are derived from it in conditions.py."""

    STARTING = "Starting"
    RESTARTING = "Restarting"
    RUNNING = "Running"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    COMPLETE = "Complete"
    FAILED = "Failed"


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event on the job; posted after the status that it speaks of is written."""

    reason: str
    message: str
    warning: bool = False


@dataclass(frozen=True)
class Transition:
    """Answer of a policy: the new state of the job, the reason, and the actions.

    `status` holds the numbers that only policies change (attempt, restarts, attempts, times); everything else in it is
    derived afterwards. Events are posted only when the state or its reason changes.
    """

    state: State
    reason: str
    message: str
    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_at: datetime | None = None


@dataclass(frozen=True)
class Decision:
    """The actions, their reasons, and the time of the next look.

    The shell writes `status` first, if its meaning changed, and only then executes the actions: attempt and restart
    count stand in the status before a pod of the old gang is deleted or one of the new gang is created. Events go out
    after a status write that succeeded, and only with it.
    """

    reason: str
    message: str
    status: JobStatus | None = None
    """The whole new status; None: leave it alone."""
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_at: datetime | None = None
