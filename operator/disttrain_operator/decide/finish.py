"""The one way in which a job ends."""

from dataclasses import replace
from datetime import datetime

from disttrain_api.run_policy import CleanPodPolicy, RunPolicy
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus, Verdict
from disttrain_operator.decide.attempt_history import end_attempt
from disttrain_operator.decide.clock import after, earliest, timestamp
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.gang_actions import Removal, remove
from disttrain_operator.decide.observed import Observed, PodFacts

SETTLING_SECONDS = 30
"""So long may the phase of a pod lag behind the end of its containers. Beside a program that has ended, further
containers have as long."""


def finish(status: JobStatus, now: datetime, state: State, verdict: Verdict) -> Transition:
    """The job ends. Its pods are cleaned up by the policy of finished jobs, once the end stands in the status."""
    status = end_attempt(status, now, verdict).model_copy(update={"completion_time": timestamp(now)})
    events = (Event(verdict.reason, verdict.message, warning=state is State.FAILED),)
    return Transition(state, verdict.reason, verdict.message, status, events=events, requeue_at=now)


def clean_pods(spec: JobSpec | None, observed: Observed, now: datetime, completed: str | None) -> Removal:
    """Deletions that cleanPodPolicy asks for when the job has finished.

    A kubelet says that a program has ended before it says that of the pod. A pod that was deleted in between would take
    the log along that says why the job has failed.
    """
    run_policy = spec.run_policy if spec is not None else RunPolicy()
    policy = run_policy.clean_pod_policy
    if policy is CleanPodPolicy.NONE:
        return Removal()
    pods = [pod for pod in observed.pods if not pod.gone and (pod.pod_alive or policy is CleanPodPolicy.ALL)]
    settled_at = after(completed, SETTLING_SECONDS) if completed is not None else now
    settling = [pod for pod in pods if policy is CleanPodPolicy.RUNNING and now < settled_at and _has_ended(pod)]
    why = f"the job has finished and cleanPodPolicy is {policy}"
    removal = remove([pod for pod in pods if pod not in settling], run_policy, now, why)
    return replace(removal, requeue_at=earliest(removal.requeue_at, settled_at)) if settling else removal


def _has_ended(pod: PodFacts) -> bool:
    """Whether its program has ended, and nobody has asked for the pod's end."""
    return pod.exit is not None and pod.deletion is None
