"""A member failed or vanished, or all hang: the gang is made again from the last checkpoint, or the job fails."""

from disttrain_api.bounds import continued
from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.scheduling import GangScheduler
from disttrain_api.status import JobStatus, Verdict
from disttrain_operator.decide.attempt import start_attempt, wait_for_attempt
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.failure_policy import Ruling
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS, remove
from disttrain_operator.decide.hang import hang_of
from disttrain_operator.decide.ledger import (
    await_end,
    awaited_end,
    count_restart,
    end_attempt,
    in_attempt,
    mark_admitted,
    next_attempt_at,
    ran,
    restarting,
)
from disttrain_operator.decide.restart_limits import repeated, used_up
from disttrain_operator.decide.situation import Situation
from disttrain_operator.decide.unstarted import gave_up, kept_back, verdict_of_start
from disttrain_operator.decide.verdict import verdict_of

# These hold pods back before they have a node.
_QUEUES = (GangScheduler.KUEUE, GangScheduler.GATE)


def restart_policy(situation: Situation) -> Move | None:
    """Restart or fail the job when a member of its gang failed or vanished and that concerns all, or all hang."""
    status, failures, policy = situation.status, situation.failures, situation.run_policy
    if not in_attempt(status):
        return None
    judged = awaited_end(status)
    if judged is not None:
        return _restart_or_fail(situation, judged)
    found = failures.of_the_gang
    gave_up_first = _gave_up(situation)
    if gave_up_first is not None:
        why = kept_back(situation.gang)
        # The others are about to start: nothing is lost by waiting for them.
        return None if why is None else _restart_or_fail(situation, verdict_of_start(why, *gave_up_first, policy))
    if found is None:
        hang = hang_of(situation.gang)
        return None if hang is None else _restart_or_fail(situation, hang)
    if failures.settled_at is not None:
        message = "a pod failed; waiting for the exits of its peers, to name the first cause"
        return Move(_state(status), Reason.POD_FAILED, message, status, look_again_at=failures.settled_at)
    verdict = verdict_of(*found, policy)
    return _restart_or_fail(situation, repeated(status, verdict) or verdict)


def _gave_up(situation: Situation) -> tuple[Cause, Ruling] | None:
    """The first cause, where that pod gave up waiting for members that have not started. A rule of one's own decides
    about a gang as it does of any other."""
    failures = situation.failures
    found = failures.of_the_gang or min(failures.of_single_pods, key=lambda entry: entry[0].rank, default=None)
    if found is None or not gave_up(situation.gang, found[0]):
        return None
    return None if found[1].rule is not None and failures.of_the_gang is not None else found


def _with_admission(situation: Situation) -> JobStatus:
    """The status with when a queue or the gate ceased to hold the attempt, which one deadline of the whole start needs:
    of one that ends before it was let go that is now."""
    gang, status = situation.gang, situation.status
    queued = gang.spec.run_policy.scheduling_policy.gang_scheduler in _QUEUES
    if not queued or ran(status) or status.attempts[-1].admitted_time is not None:
        return status
    return mark_admitted(status, gang.released_at or situation.now)


def _state(status: JobStatus) -> State:
    if ran(status):
        return State.RUNNING
    return State.RESTARTING if restarting(status) else State.STARTING


def _restart_or_fail(situation: Situation, verdict: Verdict) -> Move:
    policy, status, now = situation.run_policy, situation.status, situation.now
    counted = verdict.action != FailureAction.RESTART_WITHOUT_COUNTING
    if verdict.action == FailureAction.FAIL_JOB:
        return finish(status, now, State.FAILED, verdict)
    if counted and (exhausted := used_up(status, policy, verdict)):
        may_be_renewed = policy.max_restarts and any(pod.program_alive for pod in situation.gang.pods)
        if may_be_renewed:
            return _hear_last_reports(situation, verdict)
        return finish(status, now, State.FAILED, exhausted)
    ledger = count_restart(end_attempt(_with_admission(situation), now, verdict), counted=counted)
    begins_at = next_attempt_at(ledger, policy)
    begins = "begins" if begins_at is None else f"begins at {timestamp(begins_at)}"
    sentence = continued(verdict.message, f"attempt {ledger.attempt + 1} {begins}")
    event = Event(Reason.GANG_RESTARTED, sentence, warning=True)
    if begins_at is not None:
        return wait_for_attempt(situation.job, situation.observed, ledger, begins_at, now, event)
    return start_attempt(situation.job, situation.observed, ledger, now, event)


def _hear_last_reports(situation: Situation, verdict: Verdict) -> Move:
    """No restart is left unless a pod that still runs knows of a new checkpoint: reports come with the pods' ends."""
    alive = [pod for pod in situation.gang.pods if pod.program_alive]
    why = f"attempt {situation.gang.attempt} has failed"
    removal = remove(alive, situation.run_policy, situation.now, why, SURVIVOR_GRACE_SECONDS)
    message = continued(
        verdict.message, "no restart is left: the other pods are stopped to hear whether there is a new checkpoint"
    )
    event = Event(Reason.POD_FAILED, message, warning=True)
    ledger = await_end(situation.status, verdict)
    return Move(
        _state(situation.status), Reason.POD_FAILED, message, ledger, removal.actions, (event,), removal.look_again_at
    )
