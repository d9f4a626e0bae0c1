"""Raw objects of the API server -> frozen facts. Nothing that decides reads a raw dict."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from disttrain_api.bounds import MAX_REASON_LENGTH, cut
from disttrain_api.names import CONTAINER, GANG_GATE, MANAGED_BY_US, Annotation, Label, Reason, Role
from disttrain_api.program_log import Child, torchrun_child
from disttrain_api.report import PodReport, decode_pod_report
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_api.times import EARLIEST, LATEST, parse_time
from disttrain_api.validate import read_spec
from disttrain_operator.plan.kueue import MANAGED_LABEL, QUEUE_LABEL, TERMINATION_TARGET

Raw = Mapping[str, Any]

_MAX_MESSAGE = 1024
_MAX_LAST_WORDS = 4096
_MAX_CONDITIONS = 100
_MAX_GRACE_SECONDS = 10**9


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
    managed_by: str | None = None
    """The controller that the job is meant for; None: this one. Known even of a spec that cannot be read."""


@dataclass(frozen=True)
class Waiting:
    """Why a pod has not started: a container's waiting state or the scheduler's word."""

    reason: str
    message: str
    image: str = ""


@dataclass(frozen=True)
class Exit:
    """How a pod's trainer container ended, or the pod as a whole (`code` None)."""

    code: int | None
    signal: int | None
    reason: str
    message: str
    finished_at: datetime | None


@dataclass(frozen=True)
class Deletion:
    """That a pod is being deleted: by us, a person, the scheduler, a drain, or for its node's sake."""

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
    """One pod of the job, of any attempt."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: int
    node: str | None = None
    started: bool = False
    """Its trainer container runs or has ended."""
    cut_off: bool = False
    """Its container runs, as far as is known, and yet it is not ready: its node was not heard of for a while."""
    deletion: Deletion | None = None
    gone: bool = False
    """Deleted from the API server; these are its last known facts."""
    waiting: Waiting | None = None
    exit: Exit | None = None
    report: PodReport | None = None
    disruption: str | None = None
    """Why the cluster ends it: Preempted, Drained, Evicted or NodeLost."""
    disruption_message: str = ""
    disrupted_at: datetime | None = None
    gated: bool = False
    """Our gate holds it back."""
    released_at: datetime | None = None
    """When the gate let it go."""
    conditions: tuple[PodCondition, ...] = ()
    """Of a pod that has ended or is about to."""

    @property
    def deleting(self) -> bool:
        return self.deletion is not None

    @property
    def held(self) -> bool:
        """Deleted without having ended: nothing runs of it, but a finalizer keeps the object, and with it the name."""
        return self.exit is None and not self.gone and self.deletion is not None and self.deletion.forced

    @property
    def on_lost_node(self) -> bool:
        """Nobody will tell how it ends."""
        return self.exit is None and not self.gone and self.disruption == Reason.NODE_LOST

    @property
    def child(self) -> Child | None:
        """The rank of a program of the user's own that torchrun names as the first that failed."""
        if self.report is not None or self.exit is None or not self.exit.code:
            return None
        return torchrun_child(self.exit.message)

    @property
    def signal(self) -> int | None:
        """The signal that ended its program, or the first rank of it that failed."""
        if self.exit is not None and self.exit.signal is not None:
            return self.exit.signal
        return self.child.signal if self.child is not None else None

    @property
    def succeeded(self) -> bool:
        return self.exit is not None and self.exit.code == 0

    @property
    def failed(self) -> bool:
        return self.exit is not None and self.exit.code != 0

    @property
    def alive(self) -> bool:
        """It may still run a process."""
        return self.exit is None and not self.gone and not self.held


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
    """What the gate says of a gang now. Neither nodes nor words: it has not looked at all of its pods yet."""

    nodes: tuple[tuple[str, str], ...] = ()
    """Uids of the pods that may go, with the node for each: all that it held, together."""
    why: str = ""
    """Why they may not."""
    lost: frozenset[str] = frozenset()
    """Uids of pods that were let go, have no node yet, and whose room others have taken."""


@dataclass(frozen=True)
class Observed:
    """Everything that a decision may know besides the job and the time."""

    pods: tuple[PodFacts, ...] = ()
    problems: tuple[CreateProblem, ...] = ()
    services: frozenset[str] = field(default_factory=frozenset)
    """Names of the job's Services."""
    admission: Admission | None = None
    """None: this operator has no gate, or the job does not ask for it."""


def job_facts(raw: Raw, *, former: Job | None = None) -> Job:
    """The facts of a raw DistTrainingJob. A spec that cannot be read is a fact, too, never an exception.

    former: facts of a version with the same spec, which is then not read again: that is most of the work.
    """
    metadata = raw["metadata"]
    if former is None:
        spec, violations = read_spec(raw.get("spec"))
        problems = tuple(cut(str(violation), _MAX_MESSAGE) for violation in violations)
    else:
        spec, problems = former.spec, former.problems
    return Job(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        generation=metadata.get("generation", 1),
        resource_version=metadata.get("resourceVersion", ""),
        deleting="deletionTimestamp" in metadata,
        spec=spec,
        status=JobStatus.model_validate(raw.get("status") or {}),
        problems=problems,
        managed_by=_managed_by(raw.get("spec")),
    )


def _managed_by(spec: Any) -> str | None:
    policy = spec.get("runPolicy") if isinstance(spec, Mapping) else None
    name = policy.get("managedBy") if isinstance(policy, Mapping) else None
    return name if isinstance(name, str) and name != MANAGED_BY_US else None


def pod_facts(raw: Raw, *, gone: bool = False) -> PodFacts | None:
    """The facts of a raw pod, None where its labels are not ours."""
    metadata = raw["metadata"]
    labels = metadata.get("labels") or {}
    try:
        role, index, attempt = Role(labels[Label.ROLE]), int(labels[Label.INDEX]), int(labels[Label.ATTEMPT])
    except (KeyError, ValueError):
        return None
    status: Raw = raw.get("status") or {}
    container = _trainer_status(status)
    exit_ = _exit(status, container)
    runs = "running" in (container.get("state") or {})
    deletion = _deletion(metadata)
    disruption, disruption_message, disrupted_at = _disruption(status, ended=exit_ is not None)
    gated = any(gate.get("name") == GANG_GATE for gate in (raw.get("spec") or {}).get("schedulingGates") or [])
    released_at = parse_time((metadata.get("annotations") or {}).get(Annotation.RELEASED_AT))
    return PodFacts(
        name=metadata["name"],
        uid=metadata["uid"],
        role=role,
        index=index,
        attempt=attempt,
        node=(raw.get("spec") or {}).get("nodeName"),
        started=exit_ is not None or runs,
        cut_off=exit_ is None and runs and _unready(status),
        deletion=deletion,
        gone=gone,
        waiting=None if exit_ or gated else _waiting(status, container, labels, released=released_at is not None),
        exit=exit_,
        report=decode_pod_report(exit_.message) if exit_ and exit_.message else None,
        disruption=disruption,
        disruption_message=disruption_message,
        disrupted_at=disrupted_at,
        gated=gated,
        released_at=released_at,
        conditions=_conditions(status) if exit_ or deletion or gone else (),
    )


def observe(
    pods: Iterable[Raw],
    gone_pods: Iterable[Raw] = (),
    problems: Iterable[CreateProblem] = (),
    services: Iterable[str] = (),
    admission: Admission | None = None,
) -> Observed:
    """Everything that a decision may know, from raw objects."""
    facts = [pod_facts(raw) for raw in pods] + [pod_facts(raw, gone=True) for raw in gone_pods]
    known = sorted(
        (pod for pod in facts if pod is not None), key=lambda pod: (pod.attempt, pod.role, pod.index, pod.uid)
    )
    return Observed(tuple(known), tuple(problems), frozenset(services), admission)


def _text(raw: Raw, key: str, most: int, default: str = "") -> str:
    """A text that anybody may have written, of any length."""
    return cut(raw.get(key) or default, most)


def _deletion(metadata: Raw) -> Deletion | None:
    if not metadata.get("deletionTimestamp"):
        return None
    # A grace of centuries, which anybody may ask for, ends beyond all times that are reckoned with.
    deadline = parse_time(metadata["deletionTimestamp"]) or LATEST
    grace = timedelta(seconds=min(max(metadata.get("deletionGracePeriodSeconds") or 0, 0), _MAX_GRACE_SECONDS))
    return Deletion(asked=max(deadline - grace, EARLIEST), deadline=deadline)


# Reasons of the condition DisruptionTarget.
_DISRUPTIONS = {
    "PreemptionByScheduler": Reason.PREEMPTED,
    "EvictionByEvictionAPI": Reason.DRAINED,
    "DeletionByTaintManager": Reason.DRAINED,
    "TerminationByKubelet": Reason.EVICTED,
    "DeletionByPodGC": Reason.NODE_LOST,
}
# Reasons of a failed pod's status.
_POD_REASONS = {"Evicted": Reason.EVICTED, "NodeShutdown": Reason.DRAINED, "NodeLost": Reason.NODE_LOST}


def _disruption(status: Raw, *, ended: bool) -> tuple[str | None, str, datetime | None]:
    conditions = {entry.get("type"): entry for entry in status.get("conditions") or []}
    evicted = conditions.get(TERMINATION_TARGET)
    if evicted is not None and evicted.get("status") == "True":
        return Reason.PREEMPTED, _text(evicted, "message", _MAX_MESSAGE), parse_time(evicted.get("lastTransitionTime"))
    target = conditions.get("DisruptionTarget")
    if target is not None and target.get("status") == "True":
        reason: str = _DISRUPTIONS.get(target.get("reason", ""), Reason.EVICTED)
        ready = conditions.get("Ready", {}).get("status")
        # A node that is alive lets a pod that it must give up end well; on a dead one it only ceases to be ready.
        if target.get("reason") == "DeletionByTaintManager" and ready == "False" and not ended:
            reason = Reason.NODE_LOST
        return reason, _text(target, "message", _MAX_MESSAGE), parse_time(target.get("lastTransitionTime"))
    if status.get("phase") == "Failed":
        return _POD_REASONS.get(status.get("reason", "")), _text(status, "message", _MAX_MESSAGE), None
    return None, "", None


def _unready(status: Raw) -> bool:
    conditions: list[Raw] = status.get("conditions") or []
    ready: Raw = next((entry for entry in conditions if entry.get("type") == "Ready"), {})
    # With a reason the kubelet says so itself, of a probe that fails or a container that starts.
    return ready.get("status") == "False" and not ready.get("reason")


def _conditions(status: Raw) -> tuple[PodCondition, ...]:
    # As long as those that a rule of the failure policy can name.
    return tuple(
        PodCondition(_text(entry, "type", 316), _text(entry, "status", 16), _text(entry, "reason", 1024))
        for entry in (status.get("conditions") or [])[:_MAX_CONDITIONS]
    )


def _trainer_status(status: Raw) -> Raw:
    containers = status.get("containerStatuses") or []
    return next((container for container in containers if container.get("name") == CONTAINER), {})


def _exit(status: Raw, container: Raw) -> Exit | None:
    terminated = (container.get("state") or {}).get("terminated")
    # A pod that the kubelet or the node controller ended (eviction, lost node) may say nothing of its container.
    pod_reason = status.get("reason") if status.get("phase") == "Failed" else None
    if terminated:
        code = terminated.get("exitCode", 0)
        signal = terminated.get("signal") or (code - 128 if 128 < code < 160 else None)
        return Exit(
            code=code if code or status.get("phase") != "Failed" or not pod_reason else None,
            signal=signal,
            reason=cut(pod_reason or terminated.get("reason") or "", MAX_REASON_LENGTH),
            message=(terminated.get("message") or status.get("message") or "")[-_MAX_LAST_WORDS:],
            finished_at=parse_time(terminated.get("finishedAt")),
        )
    if status.get("phase") == "Failed":
        reason = _text(status, "reason", MAX_REASON_LENGTH, "PodFailed")
        return Exit(None, None, reason, _text(status, "message", _MAX_MESSAGE), None)
    if status.get("phase") == "Succeeded":
        return Exit(0, None, "Completed", "", None)
    return None


# Volcano's words for members of a gang that, as a whole, has no room.
_NOT_PLACED = {"Schedulable": Reason.UNSCHEDULABLE, "Undetermined": Reason.UNSCHEDULABLE}


def _waiting(status: Raw, container: Raw, labels: Raw, *, released: bool) -> Waiting | None:
    init_containers = status.get("initContainerStatuses") or []
    for entry in (*init_containers, container):
        waiting = (entry.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            reason, message = _text(waiting, "reason", MAX_REASON_LENGTH), _text(waiting, "message", _MAX_MESSAGE)
            return Waiting(reason, message, _text(entry, "image", _MAX_MESSAGE))
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            said = _text(condition, "reason", MAX_REASON_LENGTH, Reason.UNSCHEDULABLE)
            reason = _NOT_PLACED.get(said, said)
            if reason == "SchedulingGated" and released:
                return None  # the scheduler has not seen its release yet
            if reason == "SchedulingGated" and QUEUE_LABEL in labels:
                reason = Reason.QUEUED if MANAGED_LABEL in labels else Reason.QUEUE_NOT_SERVED
            return Waiting(reason, _text(condition, "message", _MAX_MESSAGE))
    return None
