"""How pods are marked as a gang for Kueue, Volcano, scheduler-plugins' coscheduling, or the operator's own gate, which
releases each by a patch.
"""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import GANG_GATE, Annotation, Role
from disttrain_api.scheduling import GangScheduler
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.identity import Manifest, child_metadata, group_name
from disttrain_operator.plan.kueue import join_queue
from disttrain_operator.plan.node_affinity import REQUIRED, narrowed
from disttrain_operator.plan.site import PlannedJob

VOLCANO_GROUP = "scheduling.volcano.sh/v1beta1"
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
VOLCANO_SCHEDULER = "volcano"
COSCHEDULING_GROUP = "scheduling.x-k8s.io/v1alpha1"
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"
COSCHEDULING_SCHEDULER = "scheduler-plugins-scheduler"


def join_gang(metadata: Manifest, pod_spec: Manifest, job: PlannedJob, spec: JobSpec, role: Role, attempt: int) -> None:
    """Put into a pod's metadata and spec what its gang's scheduler reads."""
    policy = spec.run_policy.scheduling_policy
    if policy.priority_class_name is not None:
        pod_spec["priorityClassName"] = policy.priority_class_name
    name = group_name(job.name, job.uid, attempt)
    match policy.gang_scheduler:
        case GangScheduler.KUEUE:
            join_queue(metadata, pod_spec, job, spec, role, attempt)
        case GangScheduler.VOLCANO:
            metadata["annotations"] = {**(metadata.get("annotations") or {}), VOLCANO_ANNOTATION: name}
            _default_scheduler(pod_spec, VOLCANO_SCHEDULER)
        case GangScheduler.COSCHEDULING:
            metadata["labels"] = {**(metadata.get("labels") or {}), COSCHEDULING_LABEL: name}
            _default_scheduler(pod_spec, COSCHEDULING_SCHEDULER)
        case _:
            pass


def _default_scheduler(pod_spec: Manifest, name: str) -> None:
    # A cluster may run it under another name, which the template then says.
    pod_spec["schedulerName"] = pod_spec.get("schedulerName") or name


def pod_group(job: PlannedJob, spec: JobSpec, attempt: int) -> Manifest | None:
    """The PodGroup of an attempt; None where its scheduler knows no such thing."""
    policy = spec.run_policy.scheduling_policy
    group: Manifest = {"minMember": spec.pods}
    if policy.gang_scheduler is GangScheduler.VOLCANO:
        version = VOLCANO_GROUP
        optional: Manifest = {"queue": policy.queue_name, "priorityClassName": policy.priority_class_name}
    elif policy.gang_scheduler is GangScheduler.COSCHEDULING:
        version = COSCHEDULING_GROUP
        optional = {"scheduleTimeoutSeconds": policy.timeout_seconds}
    else:
        return None
    group |= {key: value for key, value in optional.items() if value is not None}
    metadata = child_metadata(job, group_name(job.name, job.uid, attempt))
    return {"apiVersion": version, "kind": "PodGroup", "metadata": metadata, "spec": group}


def release_patch(pod: Mapping[str, Any], node: str, at: str) -> dict[str, Any]:
    """A merge patch. It may be repeated: uid and gates decide whom it meets.

    The API server lets a gated pod's required node affinity become narrower, never wider: each term keeps its lines.
    """
    spec = pod["spec"]
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    gates = [gate for gate in spec.get("schedulingGates") or [] if gate.get("name") != GANG_GATE]
    return {
        "metadata": {
            "uid": pod["metadata"]["uid"],
            "annotations": {Annotation.RELEASED_AT: at, Annotation.RESERVED_NODE: node},
        },
        "spec": {
            "schedulingGates": gates,
            "affinity": {"nodeAffinity": {REQUIRED: narrowed(affinity, "In", [node])[REQUIRED]}},
        },
    }
