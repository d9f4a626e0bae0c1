"""Policy: if the failure of a member concerns no other pod, recreate it alone, with its old name and address.

That is also so where all ranks wait for it (`replaceable.py`); what does not come in time then falls to the gang.
"""

from datetime import datetime, timedelta

from disttrain_api.backoff import backoff_seconds
from disttrain_api.names import REPLACEMENT_SECONDS, Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.spec import JobSpec
from disttrain_api.status import FailureClass, Verdict
from disttrain_operator.decide.attempt_history import (
    avoid_known_nodes,
    count_restart,
    in_attempt,
    ran,
    replace_pod,
    replacements_without_progress,
)
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.dead_nodes import forced_at_once, unnoticed_nodes
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.failure_policy import is_counted
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS, create, remove
from disttrain_operator.decide.observed import ReadableJob
from disttrain_operator.decide.replaceable import waits_for_lost_pods
from disttrain_operator.decide.restart_limits import used_up
from disttrain_operator.decide.restarts import restart_or_fail
from disttrain_operator.decide.situation import Situation
from disttrain_operator.decide.unstarted import gave_up
from disttrain_operator.decide.verdict import verdict_of
from disttrain_operator.decide.waiting import USUAL_REASONS, why_waiting
from disttrain_operator.plan.identity import pod_name


def note_replacements(situation: Situation) -> Transition | None:
    """Write down and count which pods are to be made again. What is done about them follows from the status."""
    status = situation.status
    if not in_attempt(status):
        return None
    failed = [entry for entry in situation.failures.of_single_pods if not gave_up(situation.gang, entry[0])]
    if not failed:
        return None
    policy, now, waits = situation.run_policy, situation.now, waits_for_lost_pods(situation.spec)
    message = ""
    for cause, matched in failed:
        verdict = verdict_of(cause, matched, policy)
        counted = is_counted(cause)
        if counted and not waits and (exhausted := used_up(status, policy, verdict)):
            return finish(situation.status, now, State.FAILED, exhausted)
        # Those that all ranks wait for have a budget of their own (replaceable.py).
        status = count_restart(status, counted=counted and not waits)
        replaced = cause.pod.name, cause.pod.uid, cause.reason
        status = replace_pod(status, *replaced, now, counted=counted and waits, waits=waits)
        status = avoid_known_nodes(status, verdict, policy)
        message = message or verdict.message
    others = ", and the ranks of all pods wait for it" if waits else ""
    state = State.STARTING if not ran(status) else State.RESTARTING if waits else State.RUNNING
    event = Event(Reason.POD_RESTARTED, f"{message}; it alone is recreated{others}", warning=True)
    return Transition(state, Reason.REPLACING_PODS, message, status, events=(event,), requeue_at=now)


def replace_pods(situation: Situation) -> Transition | None:
    """Remove the pods that were noted and make them again. A gang that has not run yet is completed by start-up."""
    job, gang, now = situation.job, situation.gang, situation.now
    waits = waits_for_lost_pods(situation.spec)
    dead = forced_at_once(gang, gang.replaced) if waits else frozenset()
    removal = remove(gang.replaced, situation.run_policy, now, "it is recreated", SURVIVOR_GRACE_SECONDS, dead)
    if not ran(job.status):
        return None
    known = {(pod.role, pod.index) for pod in gang.pods}
    wanted = [identity for identity in gang.missing if identity not in known]
    times = [_begins_at(job, pod_name(job.name, job.uid, *identity, gang.attempt)) for identity in wanted]
    due = [identity for identity, time in zip(wanted, times, strict=True) if time is not None and now >= time]
    unstarted = [pod for pod in (*gang.unstarted, *gang.awaiting_address) if _begins_at(job, pod.name) is not None]
    if not (gang.replaced or [time for time in times if time is not None] or unstarted):
        return None
    why = why_waiting(gang)
    names = [pod.name for pod in unstarted]
    if waits:
        names += [pod_name(job.name, job.uid, *identity, gang.attempt) for identity in wanted]
    deadlines = [(at, name) for name in names if (at := _must_run_by(job, name)) is not None]
    if deadlines and (first := min(deadlines))[0] <= now:
        return _too_late(situation, first[1], why)
    sentence = "a lost pod is recreated, and the ranks of all pods wait for it"
    if not waits:
        sentence = "a failed pod is recreated, the others continue"
    reason, sentence = why or (Reason.REPLACING_PODS, sentence)
    # Bounded by the time in which it must run: else the only room might be there when the node is back.
    excluded = unnoticed_nodes(gang, now) if waits else ()
    actions = (*removal.actions, *create(gang, due, job.status.restarts if waits else 0, excluded))
    later = [at for at in (*times, removal.requeue_at, *(at for at, _ in deadlines)) if at is not None and now < at]
    state = State.RESTARTING if waits else State.RUNNING
    return Transition(state, reason, sentence, job.status, actions, requeue_at=min(later, default=None))


def _begins_at(job: ReadableJob, pod: str) -> datetime | None:
    """When the pod of this name may be made again; None where it was never replaced."""
    entries = [entry for entry in job.status.attempts[-1].replacements if entry.pod == pod]
    if not entries:
        return None
    first = job.spec.run_policy.restart_backoff_seconds
    return after(entries[-1].time, backoff_seconds(replacements_without_progress(job.status, pod), first))


def _must_run_by(job: ReadableJob, pod: str) -> datetime | None:
    """When the pod of this name, which was recreated alone, must run; None: whenever it does."""
    seconds, begun = _seconds(job.spec), _begins_at(job, pod)
    return None if seconds is None or begun is None else begun + timedelta(seconds=seconds)


def _seconds(spec: JobSpec) -> int | None:
    """How long a pod that is recreated alone may take; None: as long as it does."""
    limits = [spec.run_policy.starting_deadline_seconds, REPLACEMENT_SECONDS if waits_for_lost_pods(spec) else None]
    return min((limit for limit in limits if limit is not None), default=None)


def _too_late(situation: Situation, pod: str, why: tuple[str, str] | None) -> Transition:
    waits, seconds = waits_for_lost_pods(situation.spec), _seconds(situation.spec)
    limit = f"{seconds} s" if waits else f"startingDeadlineSeconds ({seconds})"
    message = f"pod {pod}, recreated alone, did not run within {limit}"
    if why is not None:
        message += f": {why[1]}"
    reason = why[0] if why is not None and why[0] not in USUAL_REASONS else Reason.STARTING_DEADLINE_EXCEEDED
    if not waits:
        return finish(situation.status, situation.now, State.FAILED, Verdict(reason=reason, message=message))
    # What was counted as the pod's is the gang's now.
    *_, lost = (entry for entry in situation.status.attempts[-1].replacements if entry.pod == pod)
    action = FailureAction.RESTART_GANG if lost.counted else FailureAction.RESTART_WITHOUT_COUNTING
    verdict = Verdict(reason=reason, message=message, class_=FailureClass.NOT_STARTED, action=action, pod=pod)
    return restart_or_fail(situation, verdict)
