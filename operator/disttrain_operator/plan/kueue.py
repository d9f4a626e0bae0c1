"""Kueue's plain pod groups: what pods say so that a queue of Kueue admits an attempt as a whole.

One group per attempt. Its pods are not `retriable-in-group`: once all of them have ended Kueue counts the group as
finished and takes its finalizer off them, which it would otherwise keep there until each had a successor in the group.
"""

from disttrain_api.names import QUEUE_NAME_LABEL, Label, Role
from disttrain_api.scheduling import Topology
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.identity import Manifest, group_name
from disttrain_operator.plan.site import PlannedJob

GROUP_LABEL = "kueue.x-k8s.io/pod-group-name"
MANAGED_LABEL = "kueue.x-k8s.io/managed"
"""Kueue's own, on each pod that it has taken."""
ADMISSION_GATE = "kueue.x-k8s.io/admission"
TOTAL_COUNT = "kueue.x-k8s.io/pod-group-total-count"
RETRIABLE = "kueue.x-k8s.io/retriable-in-group"
REQUIRED_TOPOLOGY = "kueue.x-k8s.io/podset-required-topology"
PREFERRED_TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
POD_INDEX_LABEL = "kueue.x-k8s.io/pod-group-pod-index-label"
TERMINATION_TARGET = "TerminationTarget"
"""Type of the condition that Kueue gives to a pod before it deletes it."""


def join_queue(
    metadata: Manifest, pod_spec: Manifest, job: PlannedJob, spec: JobSpec, role: Role, attempt: int
) -> None:
    """Make the pod a member of the attempt's group, gated until the queue admits the group."""
    policy = spec.run_policy.scheduling_policy
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        QUEUE_NAME_LABEL: policy.queue_name,
        GROUP_LABEL: group_name(job.name, job.uid, attempt),
    }
    metadata["annotations"] = {
        **(metadata.get("annotations") or {}),
        TOTAL_COUNT: str(spec.pods),
        RETRIABLE: "false",
        **(_topology(policy.topology) if policy.topology is not None and role is Role.WORKER else {}),
    }
    # Kueue's webhook would add it. Where Kueue is missing or looks elsewhere, the pods wait instead of running unasked.
    gates = pod_spec.get("schedulingGates") or []
    pod_spec["schedulingGates"] = [*gates, {"name": ADMISSION_GATE}]


def _topology(topology: Topology) -> dict[str, str]:
    key, value = (
        (REQUIRED_TOPOLOGY, topology.required) if topology.required else (PREFERRED_TOPOLOGY, topology.preferred)
    )
    return {key: value or "", POD_INDEX_LABEL: Label.INDEX}
