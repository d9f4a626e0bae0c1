"""Which pods belong together, and how this is passed to the cluster's scheduler. Kueue reads its own annotations; the
gate chooses nodes itself and reads the label."""

from disttrain_api.names import Label, Role
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.scheduling import GangScheduler, Topology
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.environment import job_mesh


class TopologyPlan:
    """The topology groups of one role's pods."""

    def __init__(self, spec: JobSpec, role: Role) -> None:
        policy = spec.run_policy.scheduling_policy
        self._topology = policy.topology if policy.gang_scheduler is not GangScheduler.KUEUE else None
        self._by_scheduler = policy.gang_scheduler is not GangScheduler.GATE
        self._role = role
        self._groups = _pods_together(spec) if self._topology is not None else ()

    def label(self, index: int) -> dict[str, str]:
        """The label that names the pod's group; none where it has none."""
        if not self._groups:
            return {}
        if self._role is Role.WORKER:
            return {Label.TOPOLOGY_GROUP: str(self._groups[index])}
        return {} if any(self._groups) else {Label.TOPOLOGY_GROUP: "0"}

    def spec(self, pod_spec: dict[str, object], labels: dict[str, str]) -> dict[str, object]:
        """Return the change in the spec of a pod with these labels that places it with its group."""
        if self._topology is None or not self._by_scheduler or Label.TOPOLOGY_GROUP not in labels:
            return {}
        group = {key: labels[key] for key in (Label.JOB_UID, Label.ATTEMPT, Label.TOPOLOGY_GROUP)}
        return {"affinity": _with_affinity(pod_spec.get("affinity"), self._topology, group)}


def _pods_together(spec: JobSpec) -> tuple[int, ...]:
    """A number for each pod, see Mesh.pods_together."""
    if spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER:
        # Ranks that share a model lie in one pod, whatever the mesh of the job.
        return (0,) * spec.workers.replicas
    return job_mesh(spec).pods_together(spec.workers.ranks_per_pod)


def _with_affinity(given: object, topology: Topology, group: dict[str, str]) -> dict[str, object]:
    affinity = dict(given) if isinstance(given, dict) else {}
    pods = dict(affinity.get("podAffinity") or {})
    kind = "required" if topology.required is not None else "preferred"
    field = f"{kind}DuringSchedulingIgnoredDuringExecution"
    term: dict[str, object] = {
        "topologyKey": topology.required or topology.preferred,
        "labelSelector": {"matchLabels": group},
    }
    entry = term if topology.required is not None else {"weight": 100, "podAffinityTerm": term}
    pods[field] = [*(pods.get(field) or []), entry]
    return {**affinity, "podAffinity": pods}
