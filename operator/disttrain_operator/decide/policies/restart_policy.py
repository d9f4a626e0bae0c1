"""A member failed or vanished, or all hang: the gang is made again from the last checkpoint, or the job fails."""

from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.attempt_history import (
    in_attempt,
    pending_verdict,
)
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.decision import Transition
from disttrain_operator.decide.failure_policy import MatchedAction
from disttrain_operator.decide.hang import hang_of
from disttrain_operator.decide.hang_in_place import in_place_first
from disttrain_operator.decide.restart_limits import repeated
from disttrain_operator.decide.restarts import restart_or_fail, state_of
from disttrain_operator.decide.situation import Situation
from disttrain_operator.decide.unstarted import gave_up, kept_back, verdict_of_start
from disttrain_operator.decide.verdict import verdict_of


def restart_policy(situation: Situation) -> Transition | None:
    """Restart or fail the job when a member of its gang failed or vanished and that concerns all, or all hang."""
    status, failures, policy = situation.status, situation.failures, situation.run_policy
    if not in_attempt(status):
        return None
    verdict = pending_verdict(status)
    if verdict is not None:
        return restart_or_fail(situation, verdict)
    found = failures.of_the_gang
    gave_up_first = _gave_up(situation)
    if gave_up_first is not None:
        why = kept_back(situation.gang)
        # The others are about to start: nothing is lost by waiting for them.
        return None if why is None else restart_or_fail(situation, verdict_of_start(why, *gave_up_first, policy))
    if found is None:
        hang = hang_of(situation.gang, situation.now)
        follows = None if hang is None else in_place_first(situation, hang)
        return restart_or_fail(situation, follows) if isinstance(follows, Verdict) else follows
    if failures.settled_at is not None:
        message = "a pod failed; waiting for the exits of its peers, to name the first cause"
        return Transition(state_of(status), Reason.POD_FAILED, message, status, requeue_at=failures.settled_at)
    verdict, report = verdict_of(*found, policy), found[0].pod.report
    in_place = report is not None and report.failure is not None and report.failure.repeated
    return restart_or_fail(situation, repeated(status, verdict, in_place=in_place) or verdict)


def _gave_up(situation: Situation) -> tuple[Cause, MatchedAction] | None:
    """The first cause, where that pod gave up waiting for members that have not started. A rule of one's own decides
    about a gang as it does of any other."""
    failures = situation.failures
    found = failures.of_the_gang or min(failures.of_single_pods, key=lambda entry: entry[0].rank, default=None)
    if found is None or not gave_up(situation.gang, found[0]):
        return None
    return None if found[1].rule is not None and failures.of_the_gang is not None else found
