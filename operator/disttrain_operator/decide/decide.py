"""The order in which policies win. Everything the operator ever does to a job is decided here.

snapshot (job, observed, now)  ->  first policy with an answer: a Transition  ->  Decision with the whole status
"""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

from disttrain_api.bounds import MAX_REASON_LENGTH, cut, listed
from disttrain_api.names import Reason
from disttrain_api.status import ConditionType, JobStatus
from disttrain_operator.decide.attempt_history import mark_succeeded
from disttrain_operator.decide.clock import earliest
from disttrain_operator.decide.conditions import condition, derive
from disttrain_operator.decide.decision import Decision, Event, Transition
from disttrain_operator.decide.finished import after_the_end, is_finished
from disttrain_operator.decide.gang import Gang, members_as_text
from disttrain_operator.decide.goodput import account
from disttrain_operator.decide.observed import Job, Observed, ReadableJob
from disttrain_operator.decide.policies.active_deadline import active_deadline, active_deadline_at
from disttrain_operator.decide.policies.admission import admission
from disttrain_operator.decide.policies.invalid_spec import invalid_spec, refuse
from disttrain_operator.decide.policies.late_node_loss import late_node_loss
from disttrain_operator.decide.policies.pending_deletion import pending_deletion
from disttrain_operator.decide.policies.replace_pods import note_replacements, replace_pods
from disttrain_operator.decide.policies.restart_policy import restart_policy
from disttrain_operator.decide.policies.startup import begin, running, starting_deadline, startup
from disttrain_operator.decide.policies.success_policy import success_policy
from disttrain_operator.decide.policies.suspend import suspend
from disttrain_operator.decide.progress import learn, report_of_rank_0, roll_back_event
from disttrain_operator.decide.restarts_in_place import failed_at, learn_restarts, paused_until, restarts_event
from disttrain_operator.decide.situation import Situation
from disttrain_operator.decide.stragglers import straggler_event, straggler_of, with_slow_node
from disttrain_operator.decide.support import with_support
from disttrain_operator.decide.suspicion import suspicion_event, suspicion_of

Policy = Callable[[Situation], Transition | None]

# The first answer wins: ends before stops, stops before restarts, restarts before starts.
POLICIES: tuple[Policy, ...] = (
    invalid_spec,
    success_policy,
    active_deadline,
    suspend,
    restart_policy,
    note_replacements,
    late_node_loss,
    admission,
    begin,
    starting_deadline,
    startup,
    replace_pods,
    pending_deletion,
    running,
)


def decide(job: Job, observed: Observed, now: datetime) -> Decision:
    """Return what to do for the job, and why. Pure: the same arguments give the same answer."""
    if job.managed_by is not None:
        return Decision(Reason.MANAGED_ELSEWHERE, f"left to {job.managed_by}")
    if job.deleting:
        return Decision("Deleting", "the job is being deleted; its children go with it")
    if job.unread is not None:
        return Decision(Reason.UNREADABLE, f"left alone: {job.unread}")
    if is_finished(job):
        return after_the_end(job, observed, now)
    read, job = job, replace(job, status=_learn(job, observed, now))
    gang: Gang | None
    named: dict[ConditionType, str] = {}
    if isinstance(job, ReadableJob):
        straggler = straggler_of(job.status, observed, job.spec)
        if straggler is not None:
            named[ConditionType.STRAGGLING] = straggler.sentence
        job = replace(job, status=with_slow_node(job.status, straggler, observed, now))
        situation = Situation(job, observed, now)
        transition = next(transition for policy in POLICIES if (transition := policy(situation)) is not None)
        gang = situation.gang_of(transition.status)
        hangs = suspicion_of(job.status, gang)
        if hangs is not None:
            named[ConditionType.HANG_SUSPECTED] = hangs
        transition = with_support(job, gang, transition, now)
    elif job.status.attempt:
        # Another version of the operator began this job: better to leave it to its pods than to end it.
        return Decision(Reason.INVALID_SPEC, f"left alone: {listed(job.problems)}")
    else:
        transition, gang = refuse(job, now), None
    status = derive(job, gang, transition, now, named)
    return Decision(
        reason=transition.reason,
        message=transition.message,
        status=account(
            read,
            status,
            transition,
            now,
            failed_at(read.status, job.status, observed),
            paused_until(job.status, observed),
            report_of_rank_0(job.status, observed),
        ),
        actions=transition.actions,
        events=(
            *restarts_event(read.status, job.status),
            *roll_back_event(read.status, status),
            *straggler_event(read.status, status),
            *suspicion_event(read.status, status),
            *_events(job, transition),
        ),
        requeue_at=earliest(transition.requeue_at, active_deadline_at(job)),
    )


def _learn(job: Job, observed: Observed, now: datetime) -> JobStatus:
    """The status with what pods and agents tell. Pods and their memory pass, and what follows from them must not."""
    status = learn(job.status, observed, now)
    if not isinstance(job, ReadableJob):
        return status
    status = learn_restarts(status, observed, job.spec)
    if not any(pod.program_succeeded for pod in observed.pods):
        return status
    return mark_succeeded(status, members_as_text(Gang(job.spec, status, observed).succeeded))


def _events(job: Job, transition: Transition) -> tuple[Event, ...]:
    """The transition's Events, unless the status already says the same. Each restart is news."""
    running, status = condition(job.status, ConditionType.RUNNING), transition.status
    now = cut(transition.reason, MAX_REASON_LENGTH), status.attempt, status.restarts
    unchanged = running is not None and (running.reason, job.status.attempt, job.status.restarts) == now
    return () if unchanged else transition.events
