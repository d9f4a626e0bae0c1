"""Pod template + identity -> pod manifest."""

import copy

from disttrain_api.names import CONFIG_VOLUME, CONTAINER, GANG_GATE, TERMINATION_LOG, Annotation, Env, Role
from disttrain_api.ownership import owner_reference
from disttrain_api.role import PodTemplate
from disttrain_api.run_policy import PodSecurity
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.agent_around import AGENT_AROUND
from disttrain_operator.plan.environment import (
    agent_port_of,
    common_environment,
    default_variables,
    gang_port_of,
    has_agent_around,
    pod_environment,
    reads_progress,
    takes_variables,
)
from disttrain_operator.plan.identity import (
    Manifest,
    child_name,
    claim_name,
    environment_secret_name,
    on_host_network,
    pod_labels,
    pod_name,
    port,
    secret_name,
)
from disttrain_operator.plan.node_affinity import narrowed
from disttrain_operator.plan.ranks_probe import startup_probe
from disttrain_operator.plan.schedulers import join_gang
from disttrain_operator.plan.site import PlannedJob, Site
from disttrain_operator.plan.template_defaults import place, with_defaults
from disttrain_operator.plan.topology import TopologyPlan

_COMMANDS = {
    Role.WORKER: ["python3", "-P", "-m", "disttrain_agent"],
    Role.PS: ["python3", "-P", "-m", "disttrain_trainer.parameter_server.server.main"],
}
_PROGRESS_READER = ["python3", "-P", "-m", "disttrain_session.program"]
_LAST_LOG_LINES = "FallbackToLogsOnError"


class RolePlan:
    """The pods of one role in one attempt. The shared part is built once; each pod then costs a few dict copies."""

    def __init__(
        self, job: PlannedJob, spec: JobSpec, role: Role, attempt: int, site: Site, avoid: tuple[str, ...] = ()
    ) -> None:
        self._job, self._spec, self._role, self._attempt, self._site = job, spec, role, attempt, site
        template = spec.workers.pod_template
        if role is Role.PS and spec.parameter_servers is not None:
            template = spec.parameter_servers.pod_template
        template = with_defaults(template, site.defaults.template)
        self._metadata: Manifest = _part(template, "metadata")
        self._pod_spec: Manifest = _part(template, "spec")
        self._pod_spec["containers"] = _with_trainer(self._pod_spec.get("containers") or [])
        _fill_pod(self._pod_spec, job, spec, site)
        if avoid:
            _avoid_nodes(self._pod_spec, avoid)
        join_gang(self._metadata, self._pod_spec, job, spec, role, attempt)
        self._topology = TopologyPlan(spec, role)
        _fill_trainer(self._pod_spec["containers"][0], spec, role, site)
        for init_container in self._pod_spec.get("initContainers") or []:
            init_container.setdefault("terminationMessagePolicy", _LAST_LOG_LINES)
        self._host_port = port(role, job.uid, template) if on_host_network(template) else None
        self._fill_environment(site)

    def _fill_environment(self, site: Site) -> None:
        trainer = self._pod_spec["containers"][0]
        given = {entry["name"] for entry in trainer.get("env") or []}
        defaults = {name: value for name, value in default_variables(site).items() if name not in given}
        if takes_variables(trainer, site):
            secret = environment_secret_name(self._job.name, self._job.uid, site.token)
            trainer["envFrom"] = [{"secretRef": {"name": secret}}, *trainer["envFrom"]]
            defaults = {}
        contract = common_environment(self._job, self._spec, self._role, self._attempt, site)
        contract[Env.GRACE_SECONDS] = str(self._pod_spec["terminationGracePeriodSeconds"])
        # The contract stands first: a template's own variables may then refer to it with $(NAME).
        self._environment: list[Manifest] = [
            {"name": name, "value": value} for name, value in (contract | defaults).items()
        ]
        if self._spec.training is not None and self._spec.training.preflight:
            # Only the kubelet knows it.
            entry: Manifest = {"name": Env.NODE_NAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
            self._environment.append(entry)
        self._environment += trainer.get("env") or []

    def pod(self, index: int, *, gated: bool = False, replacement: int = 0, dead: tuple[str, ...] = ()) -> Manifest:
        """Manifest of the pod with this index in its role.

        `gated`: no node takes it until the gate lets it go. `replacement`, `dead`: as of
        CreatePod.
        """
        job = self._job
        name = pod_name(job.name, job.uid, self._role, index, self._attempt)
        environment = pod_environment(job, self._spec, self._role, index, self._site)
        if replacement:
            environment[Env.REPLACEMENT] = str(replacement)
        own = [{"name": key, "value": value} for key, value in environment.items()]
        trainer = {**self._pod_spec["containers"][0], "env": own + self._environment}
        if reads_progress(self._spec, self._role, index):
            trainer["command"] = [*_PROGRESS_READER, *trainer["command"]]
        if has_agent_around(self._spec, self._role):
            trainer["command"] = [*AGENT_AROUND, *trainer["command"]]
        labels = (self._metadata.get("labels") or {}) | pod_labels(job.name, job.uid, self._role, index, self._attempt)
        labels |= self._topology.label(index)
        metadata = {
            **self._metadata,
            "name": name,
            "namespace": job.namespace,
            "labels": labels,
            "ownerReferences": [owner_reference(job.name, job.uid)],
        }
        if self._host_port is not None and (index == 0 or self._role is Role.PS):
            # With it on the pod the scheduler keeps other pods that listen there off the node.
            opened = [("disttrain", self._host_port)]
            agent = agent_port_of(job, self._spec, self._role, index, self._site)
            gang = gang_port_of(job, self._spec, self._site)
            opened += [] if agent is None else [("disttrain-agent", agent)]
            opened += [] if gang is None else [("disttrain-gang", gang)]
            trainer["ports"] = [*(trainer.get("ports") or []), *(_host_port(*entry) for entry in opened)]
        containers = [trainer, *self._pod_spec["containers"][1:]]
        spec = {**self._pod_spec, "hostname": name, "containers": containers}
        spec |= self._topology.spec(self._pod_spec, labels)
        if dead:
            affinity = spec.get("affinity") or {}
            node_affinity = narrowed(affinity.get("nodeAffinity") or {}, "NotIn", dead)
            spec["affinity"] = {**affinity, "nodeAffinity": node_affinity}
            annotations = metadata.get("annotations") or {}
            metadata["annotations"] = {**annotations, Annotation.NOT_ON: ",".join(dead)}
        if gated:
            spec["schedulingGates"] = [*(self._pod_spec.get("schedulingGates") or []), {"name": GANG_GATE}]
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _host_port(name: str, number: int) -> Manifest:
    return {"name": name, "containerPort": number, "hostPort": number}


def _part(template: PodTemplate, key: str) -> Manifest:
    """A copy of the template's metadata or spec, which the API server's schema has made mappings."""
    part = template.get(key)
    return copy.deepcopy(dict(part)) if isinstance(part, dict) else {}


def trainer_of(template: PodTemplate) -> Manifest:
    """The template's container `trainer`; one that has its name alone where there is none."""
    return _with_trainer(_part(template, "spec").get("containers") or [])[0]


def _with_trainer(containers: list[Manifest]) -> list[Manifest]:
    """The containers with the trainer first, added where the template has none."""
    trainer = next((container for container in containers if container.get("name") == CONTAINER), {"name": CONTAINER})
    return [trainer, *(container for container in containers if container.get("name") != CONTAINER)]


def _fill_pod(pod_spec: Manifest, job: PlannedJob, spec: JobSpec, site: Site) -> None:
    defaults = site.defaults
    pod_spec["restartPolicy"] = "Never"
    pod_spec["subdomain"] = child_name(job.name, job.uid)
    pod_spec.setdefault("terminationGracePeriodSeconds", defaults.grace_seconds)
    pod_spec.setdefault("automountServiceAccountToken", False)
    pod_spec.setdefault("enableServiceLinks", False)
    if pod_spec.get("hostNetwork") is True:
        # The default looks up names outside the cluster only, and peers find each other by the job's Service.
        pod_spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    _fill_tolerations(pod_spec, defaults.node_lost_seconds)
    if spec.run_policy.pod_security is PodSecurity.RESTRICTED:
        _restrict(pod_spec, defaults.user_id)
    config = secret_name(job.name, job.uid, site.token)
    volumes: list[Manifest] = [
        {"name": CONFIG_VOLUME, "secret": {"secretName": config, "defaultMode": 0o444}},
        {"name": "disttrain-scratch", "emptyDir": {}},
        {"name": "disttrain-shm", "emptyDir": _shm(defaults.shm_size_limit)},
    ]
    if spec.storage is not None and spec.storage.url is None:
        claim = spec.storage.claim_name or claim_name(job.name, job.uid)
        volumes.append({"name": "disttrain-storage", "persistentVolumeClaim": {"claimName": claim}})
    pod_spec["volumes"] = [*(pod_spec.get("volumes") or []), *volumes]


def _fill_tolerations(pod_spec: Manifest, seconds: int) -> None:
    tolerations = list(pod_spec.get("tolerations") or [])
    given = {toleration.get("key") for toleration in tolerations}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        # A toleration without a key tolerates every taint.
        if key not in given and None not in given:
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds})
    pod_spec["tolerations"] = tolerations


def _avoid_nodes(pod_spec: Manifest, nodes: tuple[str, ...]) -> None:
    """Preferred, not required: a cluster that has no other nodes still runs the job."""
    # A field selector's list may hold one value.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    affinity = dict(pod_spec.get("affinity") or {})
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    preferred = "preferredDuringSchedulingIgnoredDuringExecution"
    node_affinity[preferred] = [
        *(node_affinity.get(preferred) or []),
        {"weight": 100, "preference": {"matchFields": fields}},
    ]
    pod_spec["affinity"] = {**affinity, "nodeAffinity": node_affinity}


def _restrict(pod_spec: Manifest, user_id: int | None) -> None:
    """Return the security context of the restricted Pod Security Standard; fields of the template take precedence."""
    pod_spec["securityContext"] = {
        "runAsNonRoot": True,
        **({} if user_id is None else dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), user_id)),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
        **(pod_spec.get("securityContext") or {}),
    }
    for container in (*(pod_spec.get("initContainers") or []), *pod_spec["containers"]):
        container["securityContext"] = {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **(container.get("securityContext") or {}),
        }


def _shm(size_limit: str | None) -> Manifest:
    # The runtime's own /dev/shm has 64 MB; NCCL and data loaders need more.
    return {"medium": "Memory"} | ({"sizeLimit": size_limit} if size_limit else {})


def _fill_trainer(trainer: Manifest, spec: JobSpec, role: Role, site: Site) -> None:
    trainer.setdefault("image", site.trainer_image)
    if site.defaults.image_pull_policy:
        trainer.setdefault("imagePullPolicy", site.defaults.image_pull_policy)
    if spec.training is not None:
        trainer["command"] = _COMMANDS[role]
    if spec.training is not None and role is Role.WORKER:
        # A probe of the template's own says what its author means by started.
        trainer.setdefault("startupProbe", startup_probe())
    trainer.setdefault("terminationMessagePath", TERMINATION_LOG)
    # A program that writes no termination message leaves the end of its log there.
    trainer.setdefault("terminationMessagePolicy", _LAST_LOG_LINES)
    if role is Role.WORKER and spec.workers.gpus_per_pod:
        resources = trainer["resources"] = dict(trainer.get("resources") or {})
        resources["limits"] = {
            **(resources.get("limits") or {}),
            spec.workers.gpu_resource: str(spec.workers.gpus_per_pod),
        }
    mounts = list(trainer.get("volumeMounts") or [])
    given = {place(mount.get("mountPath")) for mount in mounts}
    for name, path in _mounts(spec, site):
        if place(path) not in given:
            mounts.append({"name": name, "mountPath": path} | ({"readOnly": True} if name == CONFIG_VOLUME else {}))
    trainer["volumeMounts"] = mounts


def _mounts(spec: JobSpec, site: Site) -> list[tuple[str, str]]:
    mounts = [
        (CONFIG_VOLUME, site.config_dir),
        ("disttrain-scratch", site.scratch_dir),
        ("disttrain-shm", "/dev/shm"),
    ]
    if spec.storage is not None and spec.storage.url is None:
        mounts.append(("disttrain-storage", site.storage_dir))
    return mounts
