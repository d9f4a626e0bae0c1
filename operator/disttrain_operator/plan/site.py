"""The site of a gang: what a cluster or a laptop provides to the pods of every job."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from disttrain_api.names import CONFIG_DIR, DEFAULT_GRACE_SECONDS, SCRATCH_DIR, STORAGE_DIR
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.template_defaults import TemplateDefaults


class PlannedJob(Protocol):
    """The facts of a job that planning needs."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def uid(self) -> str: ...
    @property
    def spec(self) -> JobSpec | None: ...


@dataclass(frozen=True)
class PodDefaults:
    """Defaults of every pod, which its template may override. The chart's values end here."""

    image_pull_policy: str | None = None
    shm_size_limit: str | None = None
    """Size limit of the memory-backed /dev/shm; None: what the pod's memory limit leaves."""
    user_id: int | None = 65532
    """User, group and fsGroup of restricted pods; None: the cluster chooses them."""
    grace_seconds: int = DEFAULT_GRACE_SECONDS
    node_lost_seconds: int = 30
    """How long a pod stays on a node that is not ready or unreachable; Kubernetes' own default is 300."""
    template: TemplateDefaults = field(default_factory=dict)
    """What is laid under each template."""


@dataclass(frozen=True)
class Loopback:
    """Addresses of a gang whose pods are processes of this machine."""

    master_port: int
    ps_ports: tuple[int, ...] = ()
    agent_ports: tuple[int, ...] = ()
    """Ports of the workers' agents, by the worker's index. Workers beyond the last one are not asked."""
    gang_port: int | None = None
    """Where worker 0's agent leads restarts in place of several pods."""


@dataclass(frozen=True)
class OperatorPods:
    """How a NetworkPolicy names the operator's pods."""

    namespace: str
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Site:
    """The site of a gang. `loopback` None: a cluster, where every pod has its own address."""

    trainer_image: str
    token: str
    config_dir: str = CONFIG_DIR
    storage_dir: str = STORAGE_DIR
    scratch_dir: str = SCRATCH_DIR
    loopback: Loopback | None = None
    defaults: PodDefaults = field(default_factory=PodDefaults)
    network_policies: bool = False
    """Whether each job gets a NetworkPolicy that lets only its own pods reach its pods."""
    operator: OperatorPods | None = None
    """Who may reach the agents besides; None: nobody."""
