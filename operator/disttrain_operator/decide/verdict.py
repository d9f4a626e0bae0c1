"""Exits of a gang -> the first cause, in words. A peer's lost connection is a symptom, never the cause."""

from datetime import UTC, datetime

from disttrain_api.names import ExitCode, Reason, Role, exit_reason, permanent_reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.gang import Identity
from disttrain_operator.decide.observed import Exit, PodFacts

_FAR_FUTURE = datetime.max.replace(tzinfo=UTC)


def first_cause(failed: tuple[PodFacts, ...]) -> Verdict:
    """The verdict over pods of one attempt that failed; there is at least one."""
    return _verdict(min(failed, key=_rank_of_cause))


def lost(identity: Identity, pod_name: str) -> Verdict:
    """The verdict over a pod that vanished while the job ran."""
    role, index = identity
    message = f"pod {pod_name} ({role} {index}) was deleted while the job ran"
    return Verdict(reason=Reason.POD_LOST, message=message, role=role, pod=pod_name)


def is_permanent(failed: tuple[PodFacts, ...]) -> bool:
    """Whether the first cause is one that a restart would meet again."""
    return _permanent_reason(min(failed, key=_rank_of_cause)) is not None


def _rank_of_cause(pod: PodFacts) -> tuple[int, datetime, str, int]:
    """Smaller is nearer to the cause: by kind first, then by time, then by place."""
    assert pod.exit is not None
    return (_distance(pod), pod.exit.finished_at or _FAR_FUTURE, pod.role, pod.index)


def _distance(pod: PodFacts) -> int:
    assert pod.exit is not None
    if _permanent_reason(pod):
        return 0
    if pod.exit.code is None or pod.exit.reason == Reason.OOM_KILLED:
        return 1
    if pod.report is not None and pod.exit.code == ExitCode.PEER_LOST:
        return 5
    if pod.exit.code == ExitCode.STOPPED:
        return 4
    # gloo and NCCL abort (SIGABRT) the survivors of a dead peer; a SIGKILL came from outside.
    if pod.exit.signal is not None:
        return 2 if pod.exit.signal == 9 else 3
    return 3


def _permanent_reason(pod: PodFacts) -> str | None:
    # Without a report of our agent the number is another program's and means nothing to us.
    if pod.report is None or pod.exit is None or pod.exit.code is None:
        return None
    return permanent_reason(pod.exit.code)


def _verdict(pod: PodFacts) -> Verdict:
    exit_ = pod.exit
    assert exit_ is not None
    failure = pod.report.failure if pod.report else None
    rank = failure.rank if failure else None
    subject = f"{pod.role} {pod.index}" if rank is None else f"rank {rank}"
    where = f"pod {pod.name}" + (f" on node {pod.node}" if pod.node else "")
    detail = (failure.message if failure else None) or _detail(pod, exit_)
    return Verdict(
        reason=_reason(pod, exit_),
        message=f"{subject} ({where}) {_ending(exit_)}" + (f": {detail}" if detail else ""),
        role=pod.role,
        rank=rank,
        pod=pod.name,
        node=pod.node,
        exit_code=exit_.code,
        signal=exit_.signal,
    )


def _reason(pod: PodFacts, exit_: Exit) -> str:
    if exit_.reason == Reason.OOM_KILLED:
        return Reason.OOM_KILLED
    if exit_.code is None:
        return exit_.reason or Reason.POD_FAILED
    if pod.report is not None:
        try:
            return exit_reason(ExitCode(exit_.code))
        except ValueError:
            return Reason.RANK_FAILED
    return Reason.RANK_FAILED if pod.role is Role.WORKER else Reason.POD_FAILED


def _ending(exit_: Exit) -> str:
    if exit_.reason == Reason.OOM_KILLED:
        return "ran out of memory and was killed"
    if exit_.code is None:
        return f"was ended by the cluster ({exit_.reason})"
    if exit_.signal is not None and exit_.code != ExitCode.STOPPED:
        return f"was killed by signal {exit_.signal} (exit code {exit_.code})"
    return f"exited with code {exit_.code}"


def _detail(pod: PodFacts, exit_: Exit) -> str:
    """The last line that the program left, where our agent did not say more."""
    if pod.report is not None:
        return ""
    lines = [line.strip() for line in exit_.message.splitlines() if line.strip()]
    return lines[-1][:500] if lines else ""
