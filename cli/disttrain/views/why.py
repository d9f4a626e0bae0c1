"""Why a job is where it is: (job, pods, events, now) -> one paragraph, and what to do. Pure.

The operator's conditions and verdicts hold the cause; this puts it in its place: since when, what follows, by when.
"""

from collections.abc import Sequence
from datetime import datetime

from disttrain.cluster.remote import RemoteJob
from disttrain.terminal import duration, plain
from disttrain.views.case import Case, Raw, Why, facts_of
from disttrain.views.ended import why_failed, why_succeeded
from disttrain.views.nodes import has_no_node, no_node_has
from disttrain.views.running import why_running
from disttrain.views.waiting import is_suspending, why_held, why_restarting, why_suspended, why_waiting_for_a_pod
from disttrain_api.moved import carried_over
from disttrain_api.names import MANAGED_BY_US, Reason
from disttrain_api.status import ConditionType
from disttrain_operator.decide.attempt_history import ran

UNSEEN_SECONDS = 15
"""After which a job that no operator has looked at is one that none looks at."""


def why(job: RemoteJob, pods: Sequence[Raw], events: Sequence[Raw], now: datetime, nodes: Sequence[Raw] = ()) -> Why:
    """Return why the job is where it is.

    pods: of all its attempts. events: on the job, and on the pods that have not started, oldest first. nodes: those of
    the cluster, where a pod has none and they may be read.
    """
    unplaced = next((pod for pod in pods if has_no_node(pod)), None)
    misfit = no_node_has(unplaced, nodes) if unplaced is not None else (None, None)
    case = Case(job, [fact for fact in map(facts_of, pods) if fact is not None], events, now, misfit)
    if job.holds(ConditionType.COMPLETE):
        return why_succeeded(case)
    return why_failed(case) if job.holds(ConditionType.FAILED) else _of_a_living_job(case)


def _of_a_living_job(case: Case) -> Why:
    job, status = case.job, case.job.status
    if job.raw["metadata"].get("deletionTimestamp"):
        left = [pod.name for pod in case.pods if pod.pod_alive]
        waits = f"; {len(left)} pods are still ending, for example {left[0]}" if left else ""
        return Why(f"{job.name} is being deleted{waits}.", next=(f"kubectl get pods -n {job.namespace}",))
    manager = (carried_over(job.raw.get("spec"))[0] or {}).get("managedBy")
    if isinstance(manager, str) and manager != MANAGED_BY_US:
        return Why(
            f"{job.name} is left alone by this operator: spec.managedBy names the controller {plain(manager)}.",
            ("Look at that controller, or make the job without `managedBy`",),
        )
    if not status.conditions:
        return _unseen(case)
    running = job.condition(ConditionType.RUNNING)
    if running is not None and running.reason == Reason.OPERATOR_ERROR:
        return why_held(case, running.reason, running.message)
    if job.holds(ConditionType.SUSPENDED) or is_suspending(job):
        return why_suspended(case)
    if job.holds(ConditionType.RUNNING):
        return why_running(case)
    if job.holds(ConditionType.RESTARTING):
        return why_waiting_for_a_pod(case) if ran(status) else why_restarting(case)
    reason, message = (running.reason, running.message) if running is not None else ("", "")
    return why_held(case, reason, message)


def _unseen(case: Case) -> Why:
    job = case.job
    made = job.created
    seconds = (case.now - made).total_seconds() if made is not None else UNSEEN_SECONDS
    if seconds < UNSEEN_SECONDS:
        return Why(f"{job.name} was made {duration(seconds)} ago, and the operator is about to look at it.")
    return Why(
        f"{job.name} was made {duration(seconds)} ago, and no operator has looked at it: none is installed that serves"
        f" namespace {job.namespace}, or none leads.",
        ("`disttrain doctor` looks for the operator and says what to do",),
    )
