"""Why a gang does not run yet: one reason, one sentence, and what to do."""

from datetime import datetime

from disttrain_api.bounds import continued
from disttrain_api.names import Reason
from disttrain_api.run_policy import PodSecurity
from disttrain_api.spec import JobSpec
from disttrain_operator.decide.addresses import address_overdue_at, why_without_address
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.gang import QUEUES, Gang
from disttrain_operator.decide.observed import CreateProblem, PodFacts
from disttrain_operator.decide.pod_events import PULLING
from disttrain_operator.decide.pulls import REASON, REASONS, why_not_pulled
from disttrain_operator.decide.refusals import what_to_do_about_refusal, what_to_do_about_scheduling
from disttrain_operator.decide.volumes import of_volume

# Most starts are over by then, image and all.
_SILENT_SECONDS = 300
_IDS, _UNSPECIFIED = "Ids", "Unspecified"
ADVICE = {
    "InvalidImageName": "correct the image's name",
    "ErrImageNeverPull": "the image is not on the node and imagePullPolicy is Never: load it there or allow pulling",
    "CreateContainerConfigError": "an image that must run as root needs runPolicy.podSecurity: Template; "
    "otherwise check the Secrets and ConfigMaps that the template names",
    "CreateContainerError": "check the container's command and mounts",
    "RunContainerError": "check the container's command and mounts",
    Reason.CRASH_LOOP: "read the container's log",
    "FailedMount": "check that all that the volumes of the template name exists in this namespace",
    "FailedAttachVolume": "`kubectl describe pvc` and `kubectl get pv` say more",
    "Multi-Attach": "pods on several nodes need a claim with access mode ReadWriteMany; the volume of a deleted pod"
    " is released within minutes",
    "FailedCreatePodSandBox": "it is the node's network or container runtime: tell the cluster's administrator, or"
    " keep the job off that node",
    Reason.QUOTA_EXCEEDED: "raise the namespace's quota or ask for less",
    Reason.NOT_INSTALLED: "install it, or choose another `gangScheduler` in schedulingPolicy",
    Reason.OPERATOR_FORBIDDEN: "give the operator's service account this right",
    Reason.FORBIDDEN: "make the template follow the namespace's rules, or change them",
    _IDS: "where the template has no user and group the operator sets them: `podDefaults.userId: null` in the chart's"
    " values leaves them to the cluster, `runPolicy.podSecurity: Template` this job's whole security context to its"
    " template",
    _UNSPECIFIED: "say how much in `workers.resources` and `parameterServers.resources`, or in the template's"
    " containers; a LimitRange in the namespace gives defaults to pods that say nothing",
    Reason.INVALID_POD: "correct the pod template",
    Reason.NAME_CONFLICT: "delete the foreign object or give the job another name",
}


USUAL_REASONS = frozenset({Reason.WAITING_FOR_OLD_PODS, Reason.WAITING_FOR_PODS, Reason.POD_INITIALIZING, PULLING})
# What keeps a gang waiting in the ordinary course of things.
NO_WARNING = frozenset({Reason.QUEUED, Reason.VOLUME_NOT_BOUND})


def why_not_running(gang: Gang, now: datetime) -> tuple[str, str]:
    """(reason, sentence) of a gang that does not run yet. The sentences hold no count that changes while pods come and
    go: each change of the status is a request."""
    if any(pod.pod_alive for pod in gang.old):
        return Reason.WAITING_FOR_OLD_PODS, f"waiting for pods older than attempt {gang.attempt} to end"
    overdue_at = address_overdue_at(gang)
    if overdue_at is not None and now >= overdue_at and (without := why_without_address(gang)) is not None:
        return without
    why = why_waiting(gang)
    if why is not None:
        return why
    ended = f"; pod {gang.failed[0].name} has failed before all had started" if gang.failed else ""
    silent = unexplained_at(gang)
    detail = f": {unexplained(gang)}" if silent is not None and now >= silent else ""
    return Reason.WAITING_FOR_PODS, f"waiting for {len(gang.members)} pods to run{ended}{detail}"


def unexplained_at(gang: Gang) -> datetime | None:
    """Return when a gang without a known reason should say where to look for one; None if a reason is known."""
    if any(pod.gated for pod in gang.pods) or unexplained(gang) is None or why_waiting(gang) is not None:
        return None
    attempt = gang.status.attempts[-1]
    return after(attempt.admitted_time or attempt.start_time, _SILENT_SECONDS)


def unexplained(gang: Gang) -> str | None:
    """Return the message about a pod that has not started, without a known reason; None if all have started."""
    # Uids are random: while thousands of pods start, the one that is named seldom changes.
    pod = min(gang.unstarted, key=lambda pod: pod.uid, default=None)
    if pod is None:
        return None
    if not pod.node:
        return f"no scheduler has bound pod {pod.name} or reported why not; does the one that its template names run?"
    events = f"`kubectl get events --field-selector involvedObject.name={pod.name}`"
    return f"pod {pod.name} on node {pod.node} gives no reason; for an hour or so {events} may"


def why_waiting(gang: Gang) -> tuple[str, str] | None:
    """Return (reason, sentence) of what keeps the gang from running, the unusual first; None if it is not known."""
    if gang.observed.problems:
        return _of_problem(gang)
    waiting = [pod for pod in gang.unstarted if pod.waiting is not None]
    queued = next((pod.waiting.reason for pod in waiting if pod.waiting and pod.waiting.reason in QUEUES), None)
    if queued is not None:
        return queued, _of_queue(gang, queued)
    unusual = [pod for pod in waiting if pod.waiting and pod.waiting.reason not in USUAL_REASONS]
    if unusual:
        return _of_pod(gang, unusual[0], len(unusual))
    return _of_events(gang) or _of_init_containers(waiting)


def _of_problem(gang: Gang) -> tuple[str, str]:
    problem, count = gang.observed.problems[0], len(gang.observed.problems)
    others = f" (and {count - 1} more)" if count > 1 else ""
    advice = problem.reason
    if _is_about_ids(problem, gang.spec):
        advice = _IDS
    elif problem.reason == Reason.FORBIDDEN and "failed quota" in problem.message:
        # A full quota has a reason of its own: this one counts what the pod does not say.
        advice = _UNSPECIFIED
    sentence = f"{problem.kind} {problem.name}{others}: {problem.message}"
    if advice == Reason.FORBIDDEN and (known := what_to_do_about_refusal(problem.message)) is not None:
        return problem.reason, continued(sentence, known)
    return problem.reason, _advise(advice, sentence)


def _is_about_ids(problem: CreateProblem, spec: JobSpec) -> bool:
    """Whether the cluster refuses the user or group that the operator has filled in."""
    restricted = spec.run_policy.pod_security is PodSecurity.RESTRICTED
    refused = problem.kind == "Pod" and problem.reason in (Reason.FORBIDDEN, Reason.INVALID_POD)
    return restricted and refused and any(word in problem.message for word in ("runAsUser", "runAsGroup", "fsGroup"))


def _of_queue(gang: Gang, reason: str) -> str:
    queue = gang.spec.run_policy.scheduling_policy.queue_name
    if reason == Reason.QUEUED:
        return f"waiting in queue {queue} of Kueue; its Workload for attempt {gang.attempt} says for what"
    return (
        f"the pods name queue {queue}, but Kueue does not manage them: install it with its integration `pod`, and let"
        " it manage this namespace"
    )


def _of_pod(gang: Gang, pod: PodFacts, count: int) -> tuple[str, str]:
    assert pod.waiting is not None
    reason = pod.waiting.reason
    subject = f"pod {pod.name}" + (f" (and {count - 1} more)" if count > 1 else "")
    if reason in REASONS:
        return REASON, f"{subject}: {why_not_pulled(pod.waiting, gang.spec)}"
    if reason == Reason.UNSCHEDULABLE and (volume := of_volume(pod, gang.spec, pod.waiting.message)) is not None:
        return Reason.VOLUME_NOT_BOUND, f"{subject}: {volume}"
    detail = pod.waiting.message.strip()
    if reason == Reason.UNSCHEDULABLE:
        return reason, continued(
            f"{subject}: {detail[:500]}" if detail else subject, what_to_do_about_scheduling(detail)
        )
    return reason, _advise(reason, f"{subject}: {detail[:500]}" if detail else subject)


def _of_init_containers(pods: list[PodFacts]) -> tuple[str, str] | None:
    # Uids are random: whatever the order in which thousands of pods come and go, the one that is named seldom changes.
    pod = min(pods, key=lambda pod: pod.uid, default=None)
    return (pod.waiting.reason, f"pod {pod.name}: {pod.waiting.message}") if pod and pod.waiting else None


def _of_events(gang: Gang) -> tuple[str, str] | None:
    event = gang.observed.pod_event
    silent = (pod for pod in gang.unstarted if pod.waiting is None)
    pod = next((pod for pod in silent if event is not None and pod.uid == event.pod_uid), None)
    if event is None or pod is None:
        return None
    advice = "Multi-Attach" if event.message.startswith("Multi-Attach") else event.reason
    return event.reason, _advise(advice, f"pod {pod.name} on node {pod.node}: {event.message[:500]}")


def _advise(reason: str, sentence: str) -> str:
    advice = ADVICE.get(reason)
    return continued(sentence, advice) if advice else sentence
