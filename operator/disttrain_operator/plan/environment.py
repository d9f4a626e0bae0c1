"""The environment of a pod: the names and settings of torchrun, and those of disttrain."""

from collections.abc import Mapping
from typing import Any

from disttrain_api.mesh import Mesh
from disttrain_api.names import CONFIG_FILE, TOKEN_FILE, Env, Role
from disttrain_api.run_policy import RestartStrategy
from disttrain_api.spec import JobSpec
from disttrain_operator.plan.identity import agent_port, child_name, gang_port, pod_name, port
from disttrain_operator.plan.site import PlannedJob, Site
from disttrain_operator.plan.template_defaults import literals


def job_mesh(spec: JobSpec) -> Mesh:
    """The mesh of the job. Raises LayoutError where the degrees do not fit the world size."""
    return Mesh.of(spec.parallelism, spec.world_size)


def address(job: PlannedJob, spec: JobSpec, role: Role, index: int, attempt: int, site: Site) -> tuple[str, int]:
    """Host and port of a pod."""
    if site.loopback is not None:
        return "127.0.0.1", site.loopback.ps_ports[index] if role is Role.PS else site.loopback.master_port
    host = f"{pod_name(job.name, job.uid, role, index, attempt)}.{child_name(job.name, job.uid)}"
    pods = spec.parameter_servers if role is Role.PS and spec.parameter_servers else spec.workers
    return host, port(role, job.uid, pods.template)


def common_environment(job: PlannedJob, spec: JobSpec, role: Role, attempt: int, site: Site) -> dict[str, str]:
    """Return the environment that all pods of a role share."""
    host, master_port = address(job, spec, Role.WORKER, 0, attempt, site)
    environment = {
        Env.MASTER_ADDR: host,
        Env.MASTER_PORT: str(master_port),
        Env.WORLD_SIZE: str(spec.world_size),
        Env.JOB_NAME: job.name,
        Env.JOB_NAMESPACE: job.namespace,
        Env.JOB_UID: job.uid,
        Env.ATTEMPT: str(attempt),
        Env.ROLE: role.value,
        Env.SCRATCH: site.scratch_dir,
    }
    if spec.training is not None:
        environment[Env.CONFIG] = f"{site.config_dir}/{CONFIG_FILE}"
        # Servers count workers by it.
        environment[Env.LOCAL_WORLD_SIZE] = str(spec.workers.ranks_per_pod)
    if spec.run_policy.restart_strategy is RestartStrategy.IN_PLACE:
        environment[Env.RESTARTS_IN_PLACE] = str(spec.run_policy.max_restarts)
        environment[Env.RESTART_BACKOFF_SECONDS] = str(spec.run_policy.restart_backoff_seconds)
    if (answers_at := gang_port_of(job, spec, site)) is not None:
        environment[Env.GANG_PORT] = str(answers_at)
    if spec.storage is not None:
        environment[Env.STORAGE] = spec.storage.url or site.storage_dir
    if spec.parameter_servers is not None:
        servers = (
            address(job, spec, Role.PS, index, attempt, site) for index in range(spec.parameter_servers.replicas)
        )
        environment[Env.PS_ADDRESSES] = ",".join(f"{host}:{number}" for host, number in servers)
    if role is Role.WORKER:
        environment |= {
            Env.LOCAL_WORLD_SIZE: str(spec.workers.ranks_per_pod),
            Env.PET_NNODES: str(spec.workers.replicas),
            Env.PET_NPROC_PER_NODE: str(spec.workers.ranks_per_pod),
            Env.PET_MASTER_ADDR: host,
            Env.PET_MASTER_PORT: str(master_port),
            # torchrun's own default is the word "none", with which jobs collide.
            Env.PET_RDZV_ID: f"{job.uid}-{attempt}",
        }
        if spec.training is None:
            environment[Env.TOKEN] = f"{site.config_dir}/{TOKEN_FILE}"
        layout = spec.parallelism.model_dump_json(by_alias=True, exclude_defaults=True)
        if spec.training is None and layout != "{}":
            environment[Env.PARALLELISM] = layout
    return environment


def reads_progress(spec: JobSpec, role: Role, index: int) -> bool:
    """Return whether a pod's program is started by one that reads progress from its output."""
    return spec.progress is not None and (role, index) == (Role.WORKER, 0)


def has_agent_around(spec: JobSpec, role: Role) -> bool:
    """Return whether an agent starts a command of the user's own. Else a program that reports starts one beside it."""
    in_place = spec.run_policy.restart_strategy is RestartStrategy.IN_PLACE
    return role is Role.WORKER and spec.training is None and in_place


def agent_port_of(job: PlannedJob, spec: JobSpec, role: Role, index: int, site: Site) -> int | None:
    """Return the port of a worker's agent; None if the pod has no agent, or one that cannot be asked."""
    if role is not Role.WORKER:
        return None
    if site.loopback is None:
        return agent_port(job.uid, spec.workers.template)
    ports = site.loopback.agent_ports
    return ports[index] if index < len(ports) else None


def gang_port_of(job: PlannedJob, spec: JobSpec, site: Site) -> int | None:
    """Return the port on which worker 0's agent leads restarts in place; None where it has no other pods to lead."""
    if spec.run_policy.restart_strategy is not RestartStrategy.IN_PLACE or spec.workers.replicas == 1:
        return None
    return gang_port(job.uid, spec.workers.template) if site.loopback is None else site.loopback.gang_port


def pod_environment(job: PlannedJob, spec: JobSpec, role: Role, index: int, site: Site) -> dict[str, str]:
    """Return the environment that differs between the pods of a role."""
    environment = {Env.ROLE_INDEX: str(index)}
    if spec.progress is not None and reads_progress(spec, role, index):
        rules = spec.progress.model_dump_json(by_alias=True, exclude_none=True)
        # The kubelet takes a plain $ for a reference to a variable, or drops the second of two.
        environment[Env.PROGRESS] = rules.replace("$", "\\u0024")
    answers_at = agent_port_of(job, spec, role, index, site)
    if answers_at is not None:
        environment[Env.AGENT_PORT] = str(answers_at)
    if role is Role.WORKER:
        environment |= {Env.NODE_RANK: str(index), Env.GROUP_RANK: str(index), Env.PET_NODE_RANK: str(index)}
        # A pod of several ranks has none of its own. A rank without peers is a plain program: scripts that find a RANK
        # open a process group, often with NCCL, where alone they need neither group nor GPU.
        if spec.workers.ranks_per_pod == 1 and spec.world_size > 1:
            environment |= {Env.RANK: str(index), Env.LOCAL_RANK: "0"}
    return environment


def takes_variables(container: Mapping[str, Any], site: Site) -> bool:
    """Whether a container takes variables from Secrets or ConfigMaps, over which none of its `env` may be laid.

    Its defaults then stand in a Secret before these. On this machine nobody reads any.
    """
    return bool(container.get("envFrom")) and site.loopback is None


def default_variables(site: Site) -> dict[str, str]:
    """Return the variables of each container `trainer` whose template sets no others."""
    return scratch_environment(site) | literals(site.defaults.template)


def scratch_environment(site: Site) -> dict[str, str]:
    """Folders that an arbitrary uid can write, also where the image is read-only; a template may set others."""
    scratch = site.scratch_dir
    return {
        "HOME": scratch,
        # getpass.getuser() raises for a uid without a passwd entry unless one of its variables is set.
        "USER": "disttrain",
        # Nobody makes folders in an empty volume before the program runs, and one that is not there would not be used.
        "TMPDIR": scratch,
        "XDG_CACHE_HOME": f"{scratch}/cache",
        "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/torchinductor",
        "TRITON_CACHE_DIR": f"{scratch}/triton",
        "PYTHONUNBUFFERED": "1",
    }
