"""An attempt ends by a verdict: the next one begins, at once or after a pause, or the job ends."""

from disttrain_api.bounds import continued
from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.scheduling import GangScheduler
from disttrain_api.status import JobStatus, Verdict
from disttrain_operator.decide.attempt import start_attempt, wait_for_attempt
from disttrain_operator.decide.attempt_history import (
    count_restart,
    end_attempt,
    mark_admitted,
    next_attempt_at,
    ran,
    restarting,
    set_pending_verdict,
)
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS, remove
from disttrain_operator.decide.restart_limits import used_up
from disttrain_operator.decide.situation import Situation

# These hold pods back before they have a node.
_QUEUES = (GangScheduler.KUEUE, GangScheduler.GATE)


def restart_or_fail(situation: Situation, verdict: Verdict) -> Transition:
    """End the attempt with this verdict, and the job where that says so or no restart is left."""
    policy, status, now = situation.run_policy, situation.status, situation.now
    counted = verdict.action != FailureAction.RESTART_WITHOUT_COUNTING
    if verdict.action == FailureAction.FAIL_JOB:
        return finish(status, now, State.FAILED, verdict)
    if counted and (exhausted := used_up(status, policy, verdict)):
        may_be_renewed = policy.max_restarts and any(pod.program_alive for pod in situation.gang.pods)
        if may_be_renewed:
            return _await_last_reports(situation, verdict)
        return finish(status, now, State.FAILED, exhausted)
    status = count_restart(end_attempt(_with_admission(situation), now, verdict), counted=counted)
    begins_at = next_attempt_at(status, policy)
    begins = "begins" if begins_at is None else f"begins at {timestamp(begins_at)}"
    sentence = continued(verdict.message, f"attempt {status.attempt + 1} {begins}")
    event = Event(Reason.GANG_RESTARTED, sentence, warning=True)
    if begins_at is not None:
        return wait_for_attempt(situation.job, situation.observed, status, begins_at, now, event)
    return start_attempt(situation.job, situation.observed, status, now, event)


def _await_last_reports(situation: Situation, verdict: Verdict) -> Transition:
    """No restart is left unless a pod that still runs knows of a new checkpoint: reports come with the pods' ends."""
    alive = [pod for pod in situation.gang.pods if pod.program_alive]
    why = f"attempt {situation.gang.attempt} has failed"
    removal = remove(alive, situation.run_policy, situation.now, why, SURVIVOR_GRACE_SECONDS)
    message = continued(
        verdict.message, "no restart is left: the other pods are stopped to learn whether there is a new checkpoint"
    )
    event = Event(Reason.POD_FAILED, message, warning=True)
    status = set_pending_verdict(situation.status, verdict)
    return Transition(
        state_of(situation.status), Reason.POD_FAILED, message, status, removal.actions, (event,), removal.requeue_at
    )


def state_of(status: JobStatus) -> State:
    """Current activity of the job."""
    if ran(status):
        return State.RUNNING
    return State.RESTARTING if restarting(status) else State.STARTING


def _with_admission(situation: Situation) -> JobStatus:
    """The status with when a queue or the gate ceased to hold the attempt, which one deadline of the whole start needs:
    of one that ends before it was let go that is now."""
    gang, status = situation.gang, situation.status
    queued = gang.spec.run_policy.scheduling_policy.gang_scheduler in _QUEUES
    if not queued or ran(status) or status.attempts[-1].admitted_time is not None:
        return status
    return mark_admitted(status, gang.released_at or situation.now)
