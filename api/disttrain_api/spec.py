"""`spec` of a DistTrainingJob, and the job as a user writes it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from disttrain_api.base import ApiModel
from disttrain_api.log_rules import LoggedProgress
from disttrain_api.names import API_VERSION, DEFAULT_GPU_RESOURCE, GENERATED_LENGTH, KIND
from disttrain_api.parallelism import Parallelism
from disttrain_api.role import RolePods
from disttrain_api.run_policy import PositiveSeconds, RunPolicy
from disttrain_api.storage import Storage
from disttrain_api.training import Training


class Workers(RolePods):
    """The pods that train."""

    processes_per_pod: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Ranks per pod. Absent: gpusPerPod, else 1."""
    gpus_per_pod: Annotated[int, Field(ge=1, le=1024)] | None = None
    """GPUs of each pod; only this field requests them. Absent: none."""
    gpu_resource: Annotated[str, Field(min_length=1, max_length=253)] = DEFAULT_GPU_RESOURCE
    """Resource name that gpusPerPod requests."""

    @property
    def ranks_per_pod(self) -> int:
        """Processes of each pod."""
        return self.processes_per_pod or self.gpus_per_pod or 1


class ParameterServers(RolePods):
    """Pods of role ps, addressed in DISTTRAIN_PS_ADDRESSES; they end when the workers do. Without `training` they have
    a command or an image of their own."""


class JobSpec(ApiModel):
    """What to train, on how many pods, and with which parallelism."""

    workers: Workers
    """The pods that train."""
    parameter_servers: ParameterServers | None = None
    """Pods of role ps."""
    parallelism: Parallelism = Parallelism()
    """How the work is divided over ranks."""
    training: Training | None = None
    """What the trainer image runs. Absent: a program of your own runs."""
    storage: Storage | None = None
    """Where checkpoints outlive pods. Absent: a restart begins at step 0."""
    progress: LoggedProgress | None = None
    """Without `training`: how progress is read from the program's output. Absent: the program reports it, or there is
    none."""
    run_policy: RunPolicy = RunPolicy()
    """Restarts, failures, and the end."""
    suspend: bool = False
    """True stops the pods after a checkpoint; false starts them again from it."""
    active_deadline_seconds: PositiveSeconds | None = None
    """Time from the start (or the last resume) before the job fails. Absent: no limit."""
    ttl_seconds_after_finished: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Time after the end before the job is deleted. Absent: it is kept."""
    managed_by: Annotated[str, Field(min_length=3, max_length=63, pattern=r"^[^/]+/[^/]+$")] | None = None
    """Another controller's name, for example kueue.x-k8s.io/multikueue: this operator then leaves the job alone.
    Absent or disttrain.io/operator: this operator. It never changes."""

    @property
    def pods(self) -> int:
        """Pods of an attempt."""
        return self.workers.replicas + (self.parameter_servers.replicas if self.parameter_servers else 0)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.workers.replicas * self.workers.ranks_per_pod


class Metadata(ApiModel):
    """The part of metadata that a manifest may hold."""

    model_config = {**ApiModel.model_config, "extra": "ignore"}

    name: str
    """Where `generate_name` begins it, as long as the one that the job will have."""
    generate_name: str | None = None
    """What the API server begins the job's name with; None where the name is given."""
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _with_name(cls, given: Any) -> Any:
        if not isinstance(given, dict) or "generateName" not in given:
            return given
        if given.get("name"):
            # It counts alone, as for the API server.
            return {key: value for key, value in given.items() if key != "generateName"}
        begin = given["generateName"]
        return {**given, "name": begin + "x" * GENERATED_LENGTH} if isinstance(begin, str) and begin else given


class DistTrainingJob(ApiModel):
    """A manifest as a user writes it."""

    api_version: Literal["disttrain.io/v1alpha1"] = API_VERSION  # type: ignore[assignment]
    kind: Literal["DistTrainingJob"] = KIND  # type: ignore[assignment]
    metadata: Metadata
    spec: JobSpec
    status: dict[str, Any] | None = None
