"""Input of a decision: frozen facts, read from raw objects here (jobs) and in reading.py (pods).

Nothing that decides reads a raw dict.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from disttrain_api.bounds import cut
from disttrain_api.moved import carried_over
from disttrain_api.names import MANAGED_BY_US, Reason, Role
from disttrain_api.program_log import Child, torchrun_child
from disttrain_api.report import PodReport
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_api.times import parse_time
from disttrain_api.validate import read_spec
from disttrain_operator.decide.decision import Order
from disttrain_operator.decide.live import Live

Raw = Mapping[str, Any]

RUNTIME_REASONS = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container that ended before its program began, in the words of the node's container runtime."""
_MAX_MESSAGE = 1024
_MAX_ERROR = 300


@dataclass(frozen=True)
class Job:
    """A DistTrainingJob. `spec` is None where it cannot be read; `problems` then say why."""

    name: str
    namespace: str
    uid: str
    generation: int
    resource_version: str
    deleting: bool
    spec: JobSpec | None
    status: JobStatus
    problems: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    """Fields of an earlier version that count in it."""
    managed_by: str | None = None
    """The controller that the job is meant for; None: this one. Known even of a spec that cannot be read."""
    created: datetime | None = None
    """When the API server took it."""
    unread: str | None = None
    """Why nothing can be decided about it, and it is left alone: its status, or its pods, cannot be read."""


@dataclass(frozen=True)
class ReadableJob(Job):
    """A job whose spec can be read, the subject of policies and planning. Only `job_facts` creates it."""

    spec: JobSpec


@dataclass(frozen=True)
class Waiting:
    """Why a pod has not started: a container's waiting state or the scheduler's word."""

    reason: str
    message: str
    image: str = ""


@dataclass(frozen=True)
class Exit:
    """How a pod's program ended, the init container before it that failed, or the pod as a whole (`code` None)."""

    code: int | None
    signal: int | None
    reason: str
    message: str
    finished_at: datetime | None
    init_container: str | None = None
    """The init container that ended so: the program never began."""
    memory_limit: str = ""
    """What it might use at most, where it used more."""

    @property
    def by_runtime(self) -> bool:
        """Whether the node could not start the container: then no program has printed the message."""
        return self.reason in RUNTIME_REASONS


@dataclass(frozen=True)
class Deletion:
    """Deletion of a pod: by the operator, a person, the scheduler, a drain, or because of its node."""

    asked: datetime
    deadline: datetime
    """When its grace is over."""

    @property
    def forced(self) -> bool:
        """Without grace. `asked` then says when the pod was removed, not when somebody wanted it to end."""
        return self.deadline <= self.asked


@dataclass(frozen=True)
class PodCondition:
    """One of a pod's conditions."""

    type: str
    status: str
    reason: str


@dataclass(frozen=True)
class PodFacts:
    """One pod of the job, of any attempt. Its program is what the container `trainer` runs."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: int
    node: str | None = None
    scheduled_at: datetime | None = None
    """When it got its node."""
    program_started: bool = False
    """Its trainer container runs or has ended."""
    runs_since: datetime | None = None
    """Since when that container runs."""
    awaits_address: datetime | None = None
    """Since when its trainer container runs without ranks: its agent waits for the address of worker 0."""
    failed_beside: str = ""
    """Which further container has failed while its program runs, and how: a part of a sentence."""
    cut_off: bool = False
    """Its container runs, as far as is known, and yet it is not ready: its node has not reported for a while."""
    ready_since: datetime | None = None
    """Since when it is ready; where its node was silent, since that reports again."""
    pod_ended: bool = False
    """Its phase is Succeeded or Failed: no container of it runs any more. Its program may have ended long before."""
    deletion: Deletion | None = None
    gone: bool = False
    """Deleted from the API server; these are its last known facts."""
    waiting: Waiting | None = None
    exit: Exit | None = None
    report: PodReport | None = None
    disruption: str | None = None
    """Why the cluster ends it: Preempted, Drained, Evicted, Rejected or NodeLost."""
    disruption_message: str = ""
    """What it says of that, or of the limit of its own for which it ends the pod."""
    disrupted_at: datetime | None = None
    gated: bool = False
    """Our gate holds it back."""
    released_at: datetime | None = None
    """When the gate let it go."""
    excludes_nodes: bool = False
    """It must not run on nodes that were dead when it was created."""
    conditions: tuple[PodCondition, ...] = ()
    """They are kept only if the pod has ended or is about to."""

    @property
    def deleting(self) -> bool:
        return self.deletion is not None

    @property
    def kept_by_finalizer(self) -> bool:
        """Deleted without having ended: nothing runs of it, but a finalizer keeps the object, and with it the name."""
        return self.exit is None and not self.gone and self.deletion is not None and self.deletion.forced

    @property
    def on_lost_node(self) -> bool:
        """Nobody will tell how it ends."""
        return self.exit is None and not self.gone and self.disruption == Reason.NODE_LOST

    @property
    def child(self) -> Child | None:
        """The rank of a program of the user's own that torchrun names as the first that failed."""
        if self.report is not None or self.exit is None or not self.exit.code or self.exit.init_container:
            return None
        return torchrun_child(self.exit.message)

    @property
    def signal(self) -> int | None:
        """The signal that ended its program, or the first rank of it that failed."""
        if self.exit is not None and self.exit.signal is not None:
            return self.exit.signal
        return self.child.signal if self.child is not None else None

    @property
    def undisturbed(self) -> bool:
        """Its program runs, and nothing is about to end it or to hide how it is."""
        disturbed = self.deleting or self.cut_off or self.disruption is not None or self.exit is not None or self.gone
        return self.program_started and not disturbed

    @property
    def program_succeeded(self) -> bool:
        return self.exit is not None and self.exit.code == 0

    @property
    def program_failed(self) -> bool:
        return self.exit is not None and self.exit.code != 0

    @property
    def program_alive(self) -> bool:
        """Its trainer container may still run, or has yet to."""
        return self.exit is None and not self.gone and not self.kept_by_finalizer

    @property
    def pod_alive(self) -> bool:
        """Any of its containers may still run, or has yet to: it holds its room on the node, and its devices."""
        removed = self.gone or (self.deletion is not None and self.deletion.forced)
        return not self.pod_ended and not removed


@dataclass(frozen=True)
class CreateProblem:
    """A child that the API server refused; the shell keeps trying."""

    kind: str
    name: str
    code: int
    reason: str
    message: str


@dataclass(frozen=True)
class Admission:
    """Answer of the gate on a gang. Neither nodes nor message: it has not checked all of its pods yet."""

    nodes: tuple[tuple[str, str], ...] = ()
    """Uids of the pods that may go, with the node for each: all that it held, together."""
    why: str = ""
    """Why they may not."""
    lost: frozenset[str] = frozenset()
    """Uids of pods that were let go, have no node yet, and whose room others have taken."""


@dataclass(frozen=True)
class PodEvent:
    """Events of a pod that has a node, does not start and gives no reason itself."""

    pod_uid: str
    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """Everything that a decision may know besides the job and the time."""

    pods: tuple[PodFacts, ...] = ()
    problems: tuple[CreateProblem, ...] = ()
    services: frozenset[str] = field(default_factory=frozenset)
    """Names of the job's Services."""
    admission: Admission | None = None
    """None: this operator has no gate, or the job does not ask for it."""
    live: Live | None = None
    """The last answer of the first worker's agent; None: nobody has answered."""
    pod_event: PodEvent | None = None
    """What the Events of one pod say that does not start. None: they were not read, or give no reason."""
    supported: tuple[int, int] | None = None
    """The attempt for which this process has asked for all that its pods need, and how often again."""
    unreachable: frozenset[str] = frozenset()
    """Uids of pods that others miss, and at whose addresses nothing has answered for a while."""
    silent: frozenset[str] = frozenset()
    """Uids of pods that others miss, whose agents have not answered for a while though their nodes live."""
    order: Order | None = None
    """The last order to restart in place that this process has given for the job."""


def job_facts(raw: Raw, *, former: Job | None = None, refused: tuple[str, ...] = ()) -> Job:
    """The facts of a raw DistTrainingJob. A spec that cannot be read is a fact, too, never an exception.

    former: facts of a version with the same spec, which is then not read again: that is most of the work. refused: why
    the spec cannot be read, where that is known already.
    """
    metadata = raw["metadata"]
    stored, carried = carried_over(raw.get("spec"))
    if former is not None:
        spec, problems = former.spec, former.problems
    else:
        spec, problems = (None, refused) if refused else _spec(stored, metadata.get("labels"))
    status, unread = _status(raw.get("status") or {})
    return _job(
        spec,
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        resource_version=metadata.get("resourceVersion", ""),
        deleting="deletionTimestamp" in metadata,
        status=status,
        problems=problems,
        carried=carried,
        managed_by=_managed_by(stored),
        created=parse_time(metadata.get("creationTimestamp")),
        unread=unread,
    )


def _job(spec: JobSpec | None, **facts: Any) -> Job:
    return Job(spec=None, **facts) if spec is None else ReadableJob(spec=spec, **facts)


def _spec(raw: Any, labels: Any) -> tuple[JobSpec | None, tuple[str, ...]]:
    try:
        spec, violations = read_spec(raw, labels)
    except Exception as error:
        # Nothing that is known makes the reader fail; what is not known must not stop the operator.
        return None, (f"the spec cannot be read ({in_words(error)})",)
    return spec, tuple(cut(str(violation), _MAX_MESSAGE) for violation in violations)


def _status(raw: Any) -> tuple[JobStatus, str | None]:
    try:
        return JobStatus.model_validate(raw), None
    except Exception as error:
        return JobStatus(), f"its status cannot be read ({in_words(error)})"


def in_words(error: Exception) -> str:
    """Return an unexpected error as a part of a sentence."""
    return cut(" ".join(f"{type(error).__name__}: {error}".split()), _MAX_ERROR)


def _managed_by(spec: Any) -> str | None:
    name = spec.get("managedBy") if isinstance(spec, Mapping) else None
    return name if isinstance(name, str) and name != MANAGED_BY_US else None
