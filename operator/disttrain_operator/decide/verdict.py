"""The first cause of a failure, in words.

They are read by whoever may read the job or its Events, without the right to read logs. So they hold what Kubernetes,
our trainer and agent say in sentences of their own, of a program the type of its exception, and what it printed only
where the job asks for that (`failureLogInStatus`).
"""

from disttrain_api.bounds import continued
from disttrain_api.names import ExitCode, Reason
from disttrain_api.program_log import exception_type, last_error
from disttrain_api.report import RankFailure
from disttrain_api.run_policy import PodSecurity, RunPolicy
from disttrain_api.status import FailureClass, Replacement, Signature, Verdict
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.failure_policy import MatchedAction
from disttrain_operator.decide.observed import Exit, PodFacts

MAX_DETAIL = 500
MAX_LOG = 1500
_NO_EXCEPTION = (
    "the end of the log that Kubernetes keeps does not reach back to its exception: look at the pod's log, or decorate "
    "its main function with torch.distributed.elastic.multiprocessing.errors.record, which brings it here"
)
_NO_ERROR = "it has reported its progress and no error: look at the pod's log"
_SHELL_CODES = {126: "its command cannot be executed", 127: "its command was not found"}

_HUNG = "was killed by its agent, since no rank did a step (progressDeadlineSeconds)"

_DENIED = ("Permission denied", "PermissionError", "Operation not permitted")
_ROOT_NEEDED = " (pods do not run as root: an image that must needs `runPolicy.podSecurity: Template`)"

_DISRUPTED = {
    Reason.PREEMPTED: "was preempted by pods of a higher priority",
    Reason.DRAINED: "had to leave its node",
    Reason.EVICTED: "was evicted by its node",
    Reason.REJECTED: "was rejected by its node",
    Reason.STORAGE_LIMIT_EXCEEDED: "was evicted for using more storage than it may",
    Reason.NODE_LOST: "was lost with its node",
}

# What the cluster says of these is said; of all others what the program says.
_OF_THE_CLUSTER = frozenset({FailureClass.DISRUPTION, FailureClass.NODE_LOST, FailureClass.OUT_OF_STORAGE})


def verdict_of(cause: Cause, matched: MatchedAction, policy: RunPolicy) -> Verdict:
    """The verdict over an attempt that this cause ended."""
    pod, exit_ = cause.pod, cause.pod.exit
    failure = pod.report.failure if pod.report else None
    first = failure or pod.child
    rank = first.rank if first else None
    if cause.follows is not None:
        return _of_replaced(cause, cause.follows, matched, rank, policy)
    return Verdict(
        reason=cause.reason,
        message=_about_place(_sentence(cause, rank, policy) + _about_root(cause, policy), failure),
        class_=cause.class_,
        action=matched.action,
        rule=matched.rule,
        role=pod.role,
        rank=rank,
        pod=pod.name,
        node=pod.node,
        exit_code=exit_.code if exit_ else None,
        signal=pod.signal,
        signature=_signature(failure) if cause.class_ is FailureClass.PROGRAM else None,
        log=_log(pod) if policy.failure_log_in_status else None,
    )


def _signature(failure: RankFailure | None) -> Signature | None:
    found = failure.signature if failure is not None else None
    return None if found is None else Signature(**found.model_dump())


def _of_replaced(
    cause: Cause, replaced: Replacement, matched: MatchedAction, rank: int | None, policy: RunPolicy
) -> Verdict:
    """The verdict where a pod ended because it lost one that was made again: that one is named."""
    before = f"pod {replaced.pod} failed ({replaced.reason}) and was recreated alone, after which"
    return Verdict(
        reason=replaced.reason,
        message=f"{before} {_sentence(cause, rank, policy)}",
        class_=cause.class_,
        action=matched.action,
        rule=matched.rule,
        pod=replaced.pod,
    )


def _sentence(cause: Cause, rank: int | None, policy: RunPolicy) -> str:
    pod = cause.pod
    where = f"pod {pod.name}" + (f" on node {pod.node}" if pod.node else "")
    if cause.reason == Reason.POD_SILENT:
        return (
            f"{pod.role} {pod.index} ({where}) does not answer though its node lives, and the others wait for it: its"
            " processes may be stopped, swapped out, or in a debugger"
        )
    if cause.class_ is FailureClass.POD_LOST:
        return f"pod {pod.name} ({pod.role} {pod.index}) was deleted while the job ran"
    subject = f"{pod.role} {pod.index}" if rank is None else f"rank {rank}"
    if pod.exit is not None and pod.exit.init_container is not None:
        subject = f"init container {pod.exit.init_container} of {subject}"
    detail = _detail(cause, policy)
    return f"{subject} ({where}) {_ending(cause)}" + (f": {detail}" if detail else "")


def _about_place(sentence: str, failure: RankFailure | None) -> str:
    """Return the sentence with why the ranks did not start again in their pods, where they could have."""
    why = failure.not_in_place if failure is not None else None
    return continued(sentence, f"no restart in place: {why}") if why else sentence


def _about_root(cause: Cause, policy: RunPolicy) -> str:
    """Return what to do where a program of the user's own may have failed since it is not root."""
    if policy.pod_security is not PodSecurity.RESTRICTED or cause.class_ is not FailureClass.PROGRAM:
        return ""
    text = program_message(cause.pod) + (cause.pod.exit.message if cause.pod.exit is not None else "")
    return _ROOT_NEEDED if any(pattern in text for pattern in _DENIED) else ""


def _ending(cause: Cause) -> str:
    exit_ = cause.pod.exit
    if cause.class_ is FailureClass.OUT_OF_MEMORY:
        limit = f" (memory limit {exit_.memory_limit})" if exit_ is not None and exit_.memory_limit else ""
        return f"ran out of memory and was killed{limit}"
    if cause.class_ in _OF_THE_CLUSTER:
        ending = _DISRUPTED.get(Reason(cause.reason), "was ended by the cluster")
        if cause.reason == Reason.REJECTED and exit_ is not None:
            return f"{ending} ({exit_.reason})"
        return ending + (f" (exit code {exit_.code})" if exit_ is not None and exit_.code is not None else "")
    assert exit_ is not None
    if cause.class_ is FailureClass.HANG:
        return f"{_HUNG}, and the ranks could not start again in their pods"
    if exit_.code is None:
        return f"was ended by the cluster ({exit_.reason})"
    if (child := cause.pod.child) is not None:
        how = f"was killed by signal {child.signal}" if child.signal else f"exited with code {child.exit_code}"
        return f"{how} (torchrun exited with code {exit_.code})"
    if exit_.signal is not None and exit_.code != ExitCode.STOPPED:
        return f"was killed by signal {exit_.signal} (exit code {exit_.code})"
    return f"exited with code {exit_.code}"


def _detail(cause: Cause, policy: RunPolicy) -> str:
    """Return the message of the cluster, of the trainer or agent, or of the program as far as the job allows it."""
    pod, exit_, by_program = cause.pod, cause.pod.exit, cause.class_ is FailureClass.PROGRAM
    if cause.class_ in _OF_THE_CLUSTER or exit_ is None or exit_.code is None:
        return pod.disruption_message[:MAX_DETAIL]
    failure = pod.report.failure if pod.report is not None else None
    if pod.report is not None and failure is None:
        return _NO_ERROR if by_program else ""
    if pod.child is not None and pod.child.exception is None:
        return "" if pod.child.signal else _NO_EXCEPTION
    if policy.failure_log_in_status or exit_.by_runtime:
        return program_message(pod)
    reported = _reported(failure) if failure is not None else _of_kind(_printed_type(pod))
    if reported is not None:
        return reported
    return _SHELL_CODES.get(exit_.code, "its log says why") if by_program else ""


def words_of_rank(failure: RankFailure, pod: PodFacts, *, quoted: bool) -> str:
    """Return how a rank failed whose pod runs on. quoted: with what its program said."""
    where = f"pod {pod.name}" + (f" on node {pod.node}" if pod.node else "")
    if failure.reason == Reason.POD_LOST:
        # The one of this name may run elsewhere by now.
        return f"rank {failure.rank} was lost with its former pod {pod.name}"
    if failure.reason == Reason.PROGRESS_DEADLINE_EXCEEDED:
        return f"rank {failure.rank} ({where}) {_HUNG}"
    if failure.reason == Reason.OOM_KILLED:
        ending = "ran out of memory and was killed"
    elif failure.signal is not None:
        ending = f"was killed by signal {failure.signal}"
    else:
        ending = f"exited with code {failure.exit_code}" if failure.exit_code is not None else "ended"
    quote = failure.message if quoted else _reported(failure)
    return f"rank {failure.rank} ({where}) {ending}" + (f": {quote[:MAX_DETAIL]}" if quote else "")


def _reported(failure: RankFailure) -> str | None:
    """What may be read of a failure without the right to read logs; None: nothing is known."""
    if failure.exit_code in set(ExitCode):
        return (failure.message if failure.unquoted is None else failure.unquoted) or ""
    return _of_kind(_reported_type(failure))


def _of_kind(kind: str) -> str | None:
    return f"{kind} (its log says more)" if kind else None


def _reported_type(failure: RankFailure) -> str:
    """The type of the exception that our trainer reports, and the place in the code; "": it reports none."""
    kind = exception_type(failure.message or "") if failure.unquoted is None else failure.unquoted
    place = failure.signature.place if failure.signature is not None else None
    return f"{kind} at {place}" if kind and place else kind


def _printed_type(pod: PodFacts) -> str:
    if pod.child is not None:
        return (pod.child.exception or "").partition(":")[0]
    return exception_type(pod.exit.message) if pod.exit is not None else ""


def program_message(pod: PodFacts) -> str:
    """Return what our trainer says of its failure, or the exception or last line that another program left."""
    if pod.report is not None:
        return (pod.report.failure.message if pod.report.failure is not None else "") or ""
    if pod.child is not None:
        return pod.child.exception or ""
    return last_error(pod.exit.message) if pod.exit is not None else ""


def _log(pod: PodFacts) -> str | None:
    """The last lines of the program's log: our agent keeps them, for others the kubelet does."""
    if pod.report is not None:
        kept = pod.report.failure.log_tail if pod.report.failure else None
    else:
        kept = "\n".join(_lines(pod.exit)) if pod.exit is not None and pod.exit.code is not None else None
    return kept[-MAX_LOG:] if kept else None


def _lines(exit_: Exit | None) -> list[str]:
    return [line.strip() for line in exit_.message.splitlines() if line.strip()] if exit_ is not None else []
