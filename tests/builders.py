"""Builders of the worlds of tests. They go through the real readers and refuse worlds that cannot be."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from disttrain_api.names import CONTAINER, Annotation, Role
from disttrain_api.ownership import owner_reference
from disttrain_api.report import CheckpointReport, PodReport, RankFailure, RankReport, encode_pod_report
from disttrain_operator.decide.observed import Job, job_facts
from disttrain_operator.plan.identity import pod_labels, pod_name
from disttrain_operator.plan.ranks_probe import startup_probe

UID = "3f9a1c02-0000-4000-8000-000000000001"
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)

TRAINING: dict[str, Any] = {"model": {"name": "mlp"}, "data": {"name": "digits"}, "steps": 100, "microBatchSize": 16}


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, mapping by mapping; None removes a key."""
    result = dict(base)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = merge(result[key], value)
        else:
            result[key] = value
    return result


def a_claim_template(*, retain: bool | None = None, **spec: Any) -> dict[str, Any]:
    """A `storage` with a claim of 1 GiB that the operator makes; `spec` is laid over that of the claim."""
    template = {"spec": merge({"resources": {"requests": {"storage": "1Gi"}}}, spec)}
    policy = {} if retain is None else {"retentionPolicy": {"whenDeleted": "Retain" if retain else "Delete"}}
    return {"volumeClaimTemplate": template, **policy}


def a_manifest(name: str = "digits", **spec: Any) -> dict[str, Any]:
    """A valid manifest: two workers that train; `spec` is laid over it."""
    base = {"workers": {"replicas": 2}, "training": TRAINING}
    return {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": merge(base, spec),
    }


def a_raw_job(name: str = "digits", *, status: Mapping[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """What the API server stores for `a_manifest`."""
    raw = a_manifest(name, **spec)
    raw["metadata"] |= {"uid": UID, "generation": 1, "resourceVersion": "1"}
    if status is not None:
        raw["status"] = dict(status)
    return raw


def a_job(name: str = "digits", **spec: Any) -> Job:
    """The facts of `a_raw_job`."""
    return job_facts(a_raw_job(name, **spec))


def a_raw_pod(
    job: Job,
    role: Role = Role.WORKER,
    index: int = 0,
    attempt: int = 1,
    *,
    uid: str | None = None,
    dead: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A pod as the API server stores it right after its creation. dead: nodes that it must not run on."""
    assert job.spec is not None
    replicas = job.spec.workers.replicas
    if role is Role.PS:
        replicas = job.spec.parameter_servers.replicas if job.spec.parameter_servers else 0
    if not 0 <= index < replicas:
        raise ValueError(f"{role} {index} cannot be: the job has {replicas}")
    name = pod_name(job.name, job.uid, role, index, attempt)
    return {
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "uid": uid or f"uid-{name}",
            "labels": pod_labels(job.name, job.uid, role, index, attempt),
            "ownerReferences": [owner_reference(job.name, job.uid)],
            **({"annotations": {Annotation.NOT_ON: ",".join(dead)}} if dead else {}),
        },
        "spec": {},
        "status": {"phase": "Pending"},
    }


def with_state(pod: Mapping[str, Any], phase: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """The pod with this phase and state of its trainer container."""
    container = {"name": CONTAINER, "image": "an/image:1", "state": dict(state)}
    kept = {key: value for key, value in pod["status"].items() if key == "conditions"}
    status = {**kept, "phase": phase, "containerStatuses": [container]}
    return {**pod, "spec": {**pod["spec"], "nodeName": "node1"}, "status": status}


def running(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The pod with its trainer running."""
    return with_state(pod, "Running", {"running": {"startedAt": "2026-01-01T12:00:00Z"}})


def awaiting_address(pod: Mapping[str, Any], since: str = "2026-01-01T12:00:00Z") -> dict[str, Any]:
    """The pod with its container running, whose agent waits for the address of worker 0."""
    found = with_state(pod, "Running", {"running": {"startedAt": since}})
    found["status"]["containerStatuses"][0] |= {"ready": False, "started": False}
    found["spec"]["containers"] = [{"name": CONTAINER, "startupProbe": startup_probe()}]
    return found


def waiting(pod: Mapping[str, Any], reason: str, message: str = "") -> dict[str, Any]:
    """The pod with its trainer held back."""
    return with_state(pod, "Pending", {"waiting": {"reason": reason, "message": message}})


def ended(
    pod: Mapping[str, Any],
    code: int,
    *,
    reason: str | None = None,
    message: str = "",
    report: PodReport | None = None,
    at: str = "2026-01-01T12:00:00Z",
) -> dict[str, Any]:
    """The pod after its trainer exited with this code."""
    terminated = {
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "message": encode_pod_report(report) if report else message,
        "finishedAt": at,
    }
    return with_state(pod, "Succeeded" if code == 0 else "Failed", {"terminated": terminated})


def an_init_status(
    name: str,
    state: Mapping[str, Any],
    *,
    restarts: int = 0,
    started: bool = False,
    last: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the kubelet says of an init container. `last`: how it ended before."""
    last_state = {} if last is None else {"terminated": dict(last)}
    counts = {"ready": False, "restartCount": restarts, "started": started}
    return {"name": name, "image": "an/image:1", "state": dict(state), "lastState": last_state, **counts}


def initializing(
    pod: Mapping[str, Any], *init_containers: Mapping[str, Any], sidecars: tuple[str, ...] = (), phase: str = "Pending"
) -> dict[str, Any]:
    """The pod on a node with these statuses of its init containers; its trainer waits for them."""
    pod = with_state(pod, phase, {"waiting": {"reason": "PodInitializing"}})
    pod["spec"]["initContainers"] = [
        {"name": entry["name"]} | ({"restartPolicy": "Always"} if entry["name"] in sidecars else {})
        for entry in init_containers
    ]
    pod["status"]["initContainerStatuses"] = list(init_containers)
    return pod


def with_sidecar(pod: Mapping[str, Any]) -> dict[str, Any]:
    """The pod, whose program has ended, where a further container goes on: its phase is still Running."""
    return {**pod, "status": {**pod["status"], "phase": "Running"}}


def a_report(
    step: int = 100, *, checkpoint: int | None = None, failure: RankFailure | None = None, **metrics: float
) -> PodReport:
    """What the agent of rank 0 reports."""
    kept = None
    if checkpoint is not None:
        path = f"/checkpoints/x/step-{checkpoint}"
        kept = CheckpointReport(step=checkpoint, path=path, time="2026-01-01T12:00:00Z")
    progress = RankReport(rank=0, step=step, total_steps=100, loss=0.5, metrics=metrics, checkpoint=kept)
    return PodReport(progress=progress, failure=failure)
