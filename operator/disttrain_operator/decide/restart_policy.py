"""A member failed or vanished: the gang is made again from the last checkpoint, or the job fails."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.status import Verdict
from disttrain_operator.decide.attempt import spec_of, start_attempt, wait_for_attempt
from disttrain_operator.decide.budget import used_up
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.failures import Failures
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS, remove
from disttrain_operator.decide.ledger import (
    await_end,
    awaited_end,
    count_restart,
    end_attempt,
    in_attempt,
    next_attempt_at,
    ran,
    restarting,
)
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.repetition import repeated
from disttrain_operator.decide.verdict import verdict_of


def restart_policy(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Restart or fail the job when a member of its gang failed or vanished and the failure concerns all."""
    if not in_attempt(job.status):
        return None
    gang = Gang(spec_of(job), job.status, observed)
    judged = awaited_end(job.status)
    if judged is not None:
        return _restart_or_fail(job, gang, now, judged)
    failures = Failures(job, gang, now)
    found = failures.of_the_gang
    if found is None:
        return None
    if failures.settled_at is not None:
        message = "a pod failed; waiting for the exits of its peers, to name the first cause"
        return Move(_state(job), Reason.POD_FAILED, message, job.status, look_again_at=failures.settled_at)
    verdict = verdict_of(*found, gang.spec.run_policy)
    return _restart_or_fail(job, gang, now, repeated(job.status, verdict) or verdict)


def _state(job: Job) -> State:
    if ran(job.status):
        return State.RUNNING
    return State.RESTARTING if restarting(job.status) else State.STARTING


def _restart_or_fail(job: Job, gang: Gang, now: datetime, verdict: Verdict) -> Move:
    policy, status = spec_of(job).run_policy, job.status
    counted = verdict.action != FailureAction.RESTART_WITHOUT_COUNTING
    if verdict.action == FailureAction.FAIL_JOB:
        return finish(status, now, State.FAILED, verdict)
    if counted and (exhausted := used_up(status, policy, verdict)):
        may_be_renewed = policy.max_restarts and any(pod.alive for pod in gang.pods)
        if may_be_renewed:
            return _hear_last_reports(job, gang, now, verdict)
        return finish(status, now, State.FAILED, exhausted)
    ledger = count_restart(end_attempt(status, now, verdict), counted=counted)
    begins_at = next_attempt_at(ledger, policy)
    begins = "begins" if begins_at is None else f"begins at {timestamp(begins_at)}"
    event = Event(Reason.GANG_RESTARTED, f"{verdict.message}; attempt {ledger.attempt + 1} {begins}", warning=True)
    if begins_at is not None:
        return wait_for_attempt(job, gang.observed, ledger, begins_at, now, event)
    return start_attempt(job, gang.observed, ledger, now, event)


def _hear_last_reports(job: Job, gang: Gang, now: datetime, verdict: Verdict) -> Move:
    """No restart is left unless a pod that still runs knows of a new checkpoint: reports come with the pods' ends."""
    alive = [pod for pod in gang.pods if pod.alive]
    removal = remove(alive, gang.spec.run_policy, now, f"attempt {gang.attempt} has failed", SURVIVOR_GRACE_SECONDS)
    message = (
        f"{verdict.message}; no restart is left: the other pods are stopped to hear whether there is a new checkpoint"
    )
    event = Event(Reason.POD_FAILED, message, warning=True)
    ledger = await_end(job.status, verdict)
    return Move(_state(job), Reason.POD_FAILED, message, ledger, removal.actions, (event,), removal.look_again_at)
