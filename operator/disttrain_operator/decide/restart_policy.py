"""A rank failed or a pod vanished: the gang is made again from the last checkpoint, or the job fails."""

from datetime import datetime, timedelta

from disttrain_api.names import Reason
from disttrain_api.run_policy import RestartPolicy
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.gang_actions import create_missing, delete_old
from disttrain_operator.decide.ledger import begin_attempt, count_restart, end_attempt, in_attempt, ran, restarting
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.progress import newest_checkpoint
from disttrain_operator.decide.verdict import first_cause, is_permanent, lost
from disttrain_operator.decide.waiting import why_not_running
from disttrain_operator.plan.identity import pod_name

# A peer's exit may arrive before the victim's: wait this long for more exits before naming the cause.
COLLECT_SECONDS = 3


def restart_policy(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Restart or fail the job when a member of its running gang failed or vanished."""
    assert job.spec is not None
    if not in_attempt(job.status):
        return None
    gang = Gang(job.spec, job.status.attempt, observed)
    if gang.failed:
        settled_at = _settled_at(gang, now)
        if settled_at is not None:
            message = "a pod failed; waiting a moment for the exits of its peers, to name the first cause"
            return Move(_state(job), Reason.POD_FAILED, message, job.status, look_again_at=settled_at)
        return _restart_or_fail(job, observed, now, first_cause(gang.failed), permanent=is_permanent(gang.failed))
    if ran(job.status) and gang.missing:
        role, index = gang.missing[0]
        verdict = lost((role, index), pod_name(job.name, job.uid, role, index, job.status.attempt))
        return _restart_or_fail(job, observed, now, verdict, permanent=False)
    return None


def _settled_at(gang: Gang, now: datetime) -> datetime | None:
    """When the exits are judged; None: now."""
    if not any(pod.alive for pod in gang.pods):
        return None
    ends = [pod.exit.finished_at for pod in gang.failed if pod.exit is not None and pod.exit.finished_at is not None]
    window = timedelta(seconds=COLLECT_SECONDS)
    # A node's clock that is far ahead must not hold the restart back.
    if not ends or not now - window < min(ends) < now + window:
        return None
    return min(ends) + window


def _state(job: Job) -> State:
    if ran(job.status):
        return State.RUNNING
    return State.RESTARTING if restarting(job.status) else State.STARTING


def _restart_or_fail(job: Job, observed: Observed, now: datetime, verdict: Verdict, *, permanent: bool) -> Move:
    assert job.spec is not None
    policy, status = job.spec.run_policy, job.status
    checkpoint = newest_checkpoint(status, observed)
    fresh = checkpoint is not None and (status.checkpoint is None or checkpoint.step > status.checkpoint.step)
    used = 0 if fresh else status.restarts_since_checkpoint
    if permanent or policy.restart_policy is RestartPolicy.NEVER:
        return finish(status, now, State.FAILED, verdict)
    if used >= policy.max_restarts:
        if policy.max_restarts == 0:
            return finish(status, now, State.FAILED, verdict)
        sentence = f"{verdict.message}; maxRestarts ({policy.max_restarts}) without a new checkpoint are used up"
        exhausted = verdict.model_copy(update={"reason": Reason.RESTARTS_EXHAUSTED, "message": sentence})
        return finish(status, now, State.FAILED, exhausted)
    ledger = count_restart(end_attempt(status, now, verdict), new_checkpoint=fresh)
    ledger = begin_attempt(ledger, now)
    gang = Gang(job.spec, ledger.attempt, observed)
    actions = (*delete_old(gang), *create_missing(gang))
    reason, message = why_not_running(gang)
    event = Event(Reason.GANG_RESTARTED, f"{verdict.message}; attempt {ledger.attempt} begins", warning=True)
    return Move(State.RESTARTING, reason, message, ledger, actions, event)
