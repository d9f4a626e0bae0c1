"""A pod that failed -> what kind of cause it is, and how near it is to the first cause.

A peer's lost connection is a symptom, never the cause, and it may be seen before the exit of its victim.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from disttrain_api.names import ExitCode, Reason, Role, exit_reason, permanent_reason
from disttrain_api.report import RankFailure
from disttrain_api.status import FailureClass, Replacement
from disttrain_operator.decide.observed import PodFacts

_FAR_FUTURE = datetime.max.replace(tzinfo=UTC)
_SIGKILL = 9

# Smaller is nearer to the first cause.
_DISTANCES = {
    FailureClass.CONFIGURATION: 0,
    FailureClass.NODE_LOST: 1,
    FailureClass.OUT_OF_MEMORY: 1,
    FailureClass.OUT_OF_STORAGE: 1,
    FailureClass.DISRUPTION: 1,
    FailureClass.KILLED: 2,
    FailureClass.PROGRAM: 3,
    FailureClass.POD_LOST: 3,
    FailureClass.STOPPED: 4,
    FailureClass.PEER_LOST: 5,
    FailureClass.HANG: 2,
}
# Nothing that a peer does makes a pod end like this: the exits of the others need not be awaited.
_CERTAIN = 2


@dataclass(frozen=True, eq=False)
class Cause:
    """Why a pod failed."""

    pod: PodFacts
    class_: FailureClass
    reason: str
    follows: Replacement | None = None
    """The pod that was recreated alone shortly before, where this one ended because it lost it: that was the cause."""

    @property
    def permanent(self) -> bool:
        """Whether a restart would fail the same way."""
        return self.class_ is FailureClass.CONFIGURATION

    @property
    def symptom(self) -> bool:
        """Whether there must be another cause before it, which is not known."""
        return self.class_ is FailureClass.PEER_LOST and self.follows is None

    @property
    def certain(self) -> bool:
        """Whether it cannot be the symptom of another pod's failure."""
        stopped = self.pod.exit is not None and self.pod.exit.code == ExitCode.STOPPED
        return self.follows is not None or (_DISTANCES[self.class_] <= _CERTAIN and not stopped)

    @property
    def rank(self) -> tuple[int, datetime, str, int]:
        """Smaller is nearer to the first cause: by kind first, then by time, then by place."""
        finished = self.pod.exit.finished_at if self.pod.exit is not None else None
        return (_DISTANCES[self.class_], finished or _FAR_FUTURE, self.pod.role, self.pod.index)


def node_is_lost(pod: PodFacts) -> Cause:
    """The cause where peers have lost a pod whose node does not report."""
    return Cause(pod, FailureClass.NODE_LOST, Reason.NODE_LOST)


def pod_is_silent(pod: PodFacts) -> Cause:
    """The cause where peers miss a pod whose agent does not answer, though its node lives."""
    return Cause(pod, FailureClass.POD_LOST, Reason.POD_SILENT)


def cause_of(pod: PodFacts) -> Cause:
    """The cause of a pod's failure; a pod without any trace was lost."""
    class_ = _class(pod)
    return Cause(pod, class_, _reason(pod, class_))


def _class(pod: PodFacts) -> FailureClass:
    exit_ = pod.exit
    if pod.disruption == Reason.NODE_LOST:
        return FailureClass.NODE_LOST
    if exit_ is None:
        return FailureClass.DISRUPTION if pod.disruption is not None else FailureClass.POD_LOST
    # Without a report of our agent the number is another program's and means nothing to us.
    code = _code(pod)
    if pod.report is not None and code is not None and permanent_reason(code):
        return FailureClass.CONFIGURATION
    if _ran_out_of_memory(pod):
        return FailureClass.OUT_OF_MEMORY
    if exit_.reason == Reason.STORAGE_LIMIT_EXCEEDED:
        return FailureClass.OUT_OF_STORAGE
    if pod.report is not None and code == ExitCode.PEER_LOST:
        return FailureClass.PEER_LOST
    if pod.child is not None and pod.child.lost_a_peer:
        return FailureClass.PEER_LOST
    if _was_terminated(pod):
        return FailureClass.DISRUPTION if pod.disruption is not None else FailureClass.POD_LOST
    if exit_.code == ExitCode.STOPPED and exit_.init_container is None:
        return FailureClass.STOPPED
    failure = _reported(pod)
    if pod.signal == _SIGKILL and failure is not None and failure.reason == Reason.PROGRESS_DEADLINE_EXCEEDED:
        return FailureClass.HANG
    # gloo and NCCL abort (SIGABRT) the survivors of a dead peer; a SIGKILL came from outside.
    if pod.signal == _SIGKILL or exit_.code is None:
        return FailureClass.KILLED
    return FailureClass.PROGRAM


def _ran_out_of_memory(pod: PodFacts) -> bool:
    """Whether its program ended since the memory limit was reached.

    Container runtimes say so of a container as soon as the kernel has killed any process of it, however long it runs
    on. So an agent that has outlived this knows better what its ranks have ended by.
    """
    failure = _reported(pod)
    if failure is not None and failure.reason == Reason.OOM_KILLED:
        return True
    outlived = failure is not None and failure.out_of_memory is False
    return pod.exit is not None and pod.exit.reason == Reason.OOM_KILLED and not outlived


def _reported(pod: PodFacts) -> RankFailure | None:
    """The failure that the pod's agent reports."""
    return pod.report.failure if pod.report is not None else None


def _code(pod: PodFacts) -> int | None:
    """The exit code of the pod; where torchrun ended with its own, which is always 1, that of the rank that reports."""
    exit_, failure = pod.exit, _reported(pod)
    assert exit_ is not None
    if exit_.code == 1 and failure is not None and failure.exit_code is not None:
        return failure.exit_code
    return exit_.code


def _was_terminated(pod: PodFacts) -> bool:
    """Whether it ended because somebody wanted it to, and did not fail before that."""
    exit_, deletion = pod.exit, pod.deletion
    assert exit_ is not None
    if pod.disruption is not None:
        since = pod.disrupted_at
    elif deletion is None:
        return False
    elif deletion.forced:
        return exit_.code == ExitCode.STOPPED or exit_.signal == _SIGKILL
    else:
        since = deletion.asked
    return since is None or exit_.finished_at is None or exit_.finished_at >= since


def _reason(pod: PodFacts, class_: FailureClass) -> str:
    exit_ = pod.exit
    if class_ is FailureClass.OUT_OF_MEMORY:
        return Reason.OOM_KILLED
    if class_ is FailureClass.OUT_OF_STORAGE:
        return Reason.STORAGE_LIMIT_EXCEEDED
    if class_ is FailureClass.POD_LOST:
        return Reason.POD_LOST
    if class_ in (FailureClass.DISRUPTION, FailureClass.NODE_LOST):
        return pod.disruption or Reason.EVICTED
    if class_ is FailureClass.HANG:
        return Reason.PROGRESS_DEADLINE_EXCEEDED
    assert exit_ is not None
    if exit_.init_container is not None:
        return Reason.INIT_CONTAINER_FAILED
    if exit_.code is None:
        return exit_.reason or Reason.POD_FAILED
    if pod.report is not None:
        try:
            return exit_reason(ExitCode(_code(pod) or 0))
        except ValueError:
            return Reason.RANK_FAILED
    return Reason.RANK_FAILED if pod.role is Role.WORKER else Reason.POD_FAILED
