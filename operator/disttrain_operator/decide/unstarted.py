"""An attempt that never ran as a whole has one cause: what kept the members that did not start.

Those that started wait for them and give up in the end, each in its own words: these are symptoms. Where nothing
unusual keeps the others, they are about to start, and what failed is judged when they have.
"""

from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction, RunPolicy
from disttrain_api.status import FailureClass, Verdict
from disttrain_operator.decide.attempt_history import ran
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.failure_policy import MatchedAction
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.verdict import verdict_of
from disttrain_operator.decide.waiting import USUAL_REASONS, why_waiting

# Reasons that name no cause. Other exit codes of our trainer name one, whether all pods have started or not.
_WITHOUT_CAUSE = frozenset({Reason.RANK_FAILED, Reason.POD_FAILED})


def gave_up(gang: Gang, cause: Cause) -> bool:
    """Whether the pod may have ended since other members have not started."""
    if ran(gang.status) or gang.all_started or cause.follows is not None:
        return False
    if cause.class_ is FailureClass.PROGRAM:
        failure = cause.pod.report.failure if cause.pod.report is not None else None
        return cause.reason in _WITHOUT_CAUSE and (failure is None or failure.signature is None)
    return cause.class_ in (FailureClass.PEER_LOST, FailureClass.STOPPED)


def kept_back(gang: Gang) -> tuple[str, str] | None:
    """(reason, sentence) of what keeps members from starting; None where they are about to start."""
    why = why_waiting(gang)
    if why is not None and why[0] not in USUAL_REASONS:
        return why
    if any(pod.gated for pod in gang.unstarted):
        admission = gang.observed.admission
        return Reason.WAITING_FOR_ROOM, (admission.why if admission else "") or "waiting until all pods have room"
    return None


def verdict_of_start(why: tuple[str, str], cause: Cause, matched: MatchedAction, policy: RunPolicy) -> Verdict:
    """The verdict over an attempt of which members were kept back so, and in which this one gave up."""
    reason, sentence = why
    fails = matched.action is FailureAction.FAIL_JOB
    return Verdict(
        reason=reason,
        message=f"{sentence}; meanwhile {verdict_of(cause, matched, policy).message}",
        class_=FailureClass.NOT_STARTED,
        action=FailureAction.FAIL_JOB if fails else FailureAction.RESTART_WITHOUT_COUNTING,
    )
