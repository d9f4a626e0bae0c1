"""The objects of an attempt of a job: Service, Secret, perhaps a claim, and its pods."""

import json
from collections.abc import Mapping
from functools import cached_property

from disttrain_api.jobconfig import JobConfig
from disttrain_api.names import AGENT_PORT, CONFIG_FILE, TOKEN_FILE, Label, Role
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.environment import default_variables, takes_variables
from disttrain_operator.plan.identity import (
    Manifest,
    child_metadata,
    child_name,
    claim_name,
    environment_secret_name,
    host_agent_port,
    job_labels,
    port,
    secret_name,
)
from disttrain_operator.plan.pods import RolePlan, trainer_of
from disttrain_operator.plan.schedulers import pod_group as group_of
from disttrain_operator.plan.site import Loopback, PlannedJob, PodDefaults, Site

__all__ = [
    "GangPlan",
    "Loopback",
    "PodDefaults",
    "Site",
    "claim",
    "default_environment",
    "disruption_budget",
    "network_policy",
    "pod",
    "pod_group",
    "secret",
    "service",
]


NETWORK_POLICY_VERSION = "networking.k8s.io/v1"


class GangPlan:
    """One attempt of a job at a site."""

    def __init__(self, job: PlannedJob, attempt: int, site: Site, avoid: tuple[str, ...] = ()) -> None:
        """`avoid`: nodes that the pods prefer not to run on."""
        self._job, self._spec, self._attempt, self._site = job, _spec(job), attempt, site
        self._avoid = avoid

    @cached_property
    def _workers(self) -> RolePlan:
        return RolePlan(self._job, self._spec, Role.WORKER, self._attempt, self._site, self._avoid)

    @cached_property
    def _servers(self) -> RolePlan:
        return RolePlan(self._job, self._spec, Role.PS, self._attempt, self._site, self._avoid)

    def pod(
        self, role: Role, index: int, *, gated: bool = False, replacement: int = 0, dead: tuple[str, ...] = ()
    ) -> Manifest:
        """Manifest of one pod of the gang."""
        of_role = self._servers if role is Role.PS else self._workers
        return of_role.pod(index, gated=gated, replacement=replacement, dead=dead)


def pod(job: PlannedJob, role: Role, index: int, attempt: int, site: Site) -> Manifest:
    """Manifest of one pod; GangPlan is cheaper for many."""
    return GangPlan(job, attempt, site).pod(role, index)


def service(job: PlannedJob, site: Site) -> Manifest:
    """Headless, and with addresses before readiness: ranks find each other while they start."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": child_metadata(job, child_name(job.name, job.uid)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _addressed(job),
            "ports": [{"name": "master", "port": port(Role.WORKER, job.uid, _spec(job).workers.template)}],
        },
    }


def _addressed(job: PlannedJob) -> dict[str, str]:
    """Labels of the pods that have an address of their own.

    Our own trainer looks up rank 0 alone. A Service over thousands of pods is written anew with each of them that
    starts, which costs an API server and its nodes more than the pods themselves. Own programs may look for anyone.
    """
    labels = job_labels(job.name, job.uid)
    spec = _spec(job)
    if spec.training is None or spec.parameter_servers is not None:
        return labels
    return labels | {Label.ROLE: Role.WORKER.value, Label.INDEX: "0"}


def secret(job: PlannedJob, site: Site) -> Manifest:
    """The job's configuration and token. Immutable: kubelets need not watch it."""
    data = {TOKEN_FILE: site.token}
    config = job_config(job)
    if config is not None:
        data[CONFIG_FILE] = json.dumps(config.model_dump(mode="json", by_alias=True, exclude_none=True), indent=1)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(job, secret_name(job.name, job.uid, site.token)),
        "immutable": True,
        "stringData": data,
    }


def default_environment(job: PlannedJob, site: Site) -> Manifest | None:
    """Return the Secret with the defaults of the environment, where a template has an `envFrom` that may set others.

    A later source wins over an earlier one, and all of `env` over every source: so defaults are a source, the first.
    """
    spec = _spec(job)
    roles = [spec.workers, *([spec.parameter_servers] if spec.parameter_servers is not None else [])]
    if not any(takes_variables(trainer_of(role.pod_template), site) for role in roles):
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": child_metadata(job, environment_secret_name(job.name, job.uid, site.token)),
        "immutable": True,
        "stringData": default_variables(site),
    }


def job_config(job: PlannedJob) -> JobConfig | None:
    """Return the configuration that every rank reads; None if the template has its own command."""
    spec = _spec(job)
    if spec.training is None:
        return None
    checkpoint = spec.training.checkpoint
    return JobConfig(
        name=job.name,
        namespace=job.namespace,
        uid=job.uid,
        parallelism=spec.parallelism,
        training=spec.training,
        checkpoint_folder=(checkpoint and checkpoint.folder) or child_name(job.name, job.uid),
    )


def claim(job: PlannedJob) -> Manifest | None:
    """The claim that the operator creates; None where the job names one or has no storage."""
    storage = _spec(job).storage
    if storage is None or storage.volume_claim_template is None:
        return None
    metadata = child_metadata(job, claim_name(job.name, job.uid))
    if storage.claim_outlives_job:
        del metadata["ownerReferences"]
    given = storage.volume_claim_template.get("metadata")
    for key, entries in given.items() if isinstance(given, Mapping) else ():
        # The operator's own stand last: nobody else's may take their places.
        metadata[key] = {**(entries if isinstance(entries, Mapping) else {}), **metadata.get(key, {})}
    spec = {**storage.claim_spec, "accessModes": storage.claim_spec.get("accessModes") or ["ReadWriteMany"]}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def pod_group(job: PlannedJob, attempt: int) -> Manifest | None:
    """The PodGroup that a gang's scheduler wants of an attempt; None where it wants none."""
    return group_of(job, _spec(job), attempt)


def disruption_budget(job: PlannedJob) -> Manifest | None:
    """The PodDisruptionBudget over the pods of all attempts; None where the job asks for none."""
    budget = _spec(job).run_policy.disruption_budget
    if budget is None:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": child_metadata(job, child_name(job.name, job.uid)),
        "spec": {
            "minAvailable": budget.min_available,
            "selector": {"matchLabels": {Label.JOB_UID: job.uid}},
            # A pod that is not ready trains nothing: it may be evicted whatever the others do.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def network_policy(job: PlannedJob, site: Site) -> Manifest | None:
    """Return the NetworkPolicy by which only pods of the job reach pods of the job; None where the site has none.

    On all ports, since own programs choose theirs. The operator reaches the agents' port alone. Nothing is said of what
    the pods may reach. The kubelet's probes and `kubectl port-forward` come from the node, which no policy keeps out.
    """
    if not site.network_policies:
        return None
    pods = {"matchLabels": {Label.JOB_UID: job.uid}}
    return {
        "apiVersion": NETWORK_POLICY_VERSION,
        "kind": "NetworkPolicy",
        "metadata": child_metadata(job, child_name(job.name, job.uid)),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": pods}]}, *_from_operator(job, site)],
        },
    }


def _from_operator(job: PlannedJob, site: Site) -> list[Manifest]:
    """The rule that lets the operator ask the agents."""
    if site.operator is None:
        return []
    operator = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": site.operator.namespace}},
        "podSelector": {"matchLabels": dict(site.operator.labels)},
    }
    # It is made once, and while a job is Suspended its pods may move to the network of their nodes, or from it.
    ports = (AGENT_PORT, host_agent_port(job.uid))
    return [{"from": [operator], "ports": [{"port": number, "protocol": "TCP"} for number in ports]}]


def _spec(job: PlannedJob) -> JobSpec:
    if job.spec is None:
        raise ValueError(f"job {job.namespace}/{job.name} has no readable spec: nothing can be planned for it")
    return job.spec
