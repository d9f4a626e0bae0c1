"""The one way in which a job ends."""

from datetime import datetime

from disttrain_api.run_policy import CleanPodPolicy, RunPolicy
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus, Verdict
from disttrain_operator.decide.attempt_history import end_attempt
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.gang_actions import Removal, remove
from disttrain_operator.decide.observed import Observed


def finish(status: JobStatus, now: datetime, state: State, verdict: Verdict) -> Transition:
    """The job ends. Its pods are cleaned up by the policy of finished jobs, once the end stands in the status."""
    status = end_attempt(status, now, verdict).model_copy(update={"completion_time": timestamp(now)})
    events = (Event(verdict.reason, verdict.message, warning=state is State.FAILED),)
    return Transition(state, verdict.reason, verdict.message, status, events=events, requeue_at=now)


def clean_pods(spec: JobSpec | None, observed: Observed, now: datetime) -> Removal:
    """Deletions that cleanPodPolicy asks for when the job has finished."""
    run_policy = spec.run_policy if spec is not None else RunPolicy()
    policy = run_policy.clean_pod_policy
    if policy is CleanPodPolicy.NONE:
        return Removal()
    pods = [pod for pod in observed.pods if not pod.gone and (pod.pod_alive or policy is CleanPodPolicy.ALL)]
    return remove(pods, run_policy, now, f"the job has finished and cleanPodPolicy is {policy}")
