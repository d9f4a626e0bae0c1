"""job.json and the environment become one frozen Config. Nothing else in the trainer reads the environment,
but for what other programs' packages read in it (sinks/)."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from pydantic import ValidationError

from disttrain_api.batch import Batch, resolve_batch
from disttrain_api.jobconfig import JobConfig
from disttrain_api.mesh import Mesh
from disttrain_api.names import CONFIG_DIR, CONFIG_FILE, TOKEN_FILE, Env
from disttrain_api.parallelism import DataParallelMode, PipelineSplit
from disttrain_api.pipeline import microbatches_of
from disttrain_api.pod_address import is_loopback
from disttrain_api.spec import JobSpec, ParameterServers, Workers
from disttrain_api.storage import Storage
from disttrain_api.training import Checkpoint, ModelName, Training
from disttrain_api.validate import spec_problems
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.object_path import ObjectPath, location

# How long a rank waits for a live but silent peer. A peer that has died is noticed at once.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Config:
    """All that a rank knows before it meets the others."""

    job: JobConfig
    mesh: Mesh
    batch: Batch
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master: str = ""
    """host:port where the ranks meet, for messages."""
    store_file: Path | None = None
    """File through which the ranks meet instead, where they are all in one pod."""
    attempt: int = 1
    generation: int = 0
    """How often the ranks of the attempt have started before."""
    checkpoint_folder: Path | ObjectPath | None = None
    """Where checkpoints, fence and metrics lie; None without storage."""
    metrics_folder: Path | None = None
    """Where metrics, events and traces go; None: nowhere."""
    report_dir: Path | None = None
    pod_memory: tuple[Path, ...] = ()
    """Files in the memory of the pod that outlive its ranks (disttrain_agent/memory.py); none: it keeps none."""
    grace_seconds: float | None = None
    node: str = field(default_factory=socket.gethostname)
    """Name of the machine, for messages."""
    threads_given: bool = False
    """Whether OMP_NUM_THREADS decides the number of threads."""
    timeout: timedelta = COLLECTIVE_TIMEOUT
    servers: tuple[str, ...] = ()
    """host:port of each parameter server."""
    token: str = ""
    """The job's token; "" for ranks that were started by hand on one machine."""

    @property
    def training(self) -> Training:
        return self.job.training

    @property
    def initial_weights(self) -> Path | ObjectPath | None:
        """Return the path of a new job's initial weights; a relative path is relative to the storage."""
        text = self.training.checkpoint.initial_from if self.training.checkpoint else None
        if text is None or self.checkpoint_folder is None:
            return None
        return location(text) if text.startswith("/") or "://" in text else self.checkpoint_folder.parent / text

    @property
    def builds_on_meta(self) -> bool:
        """Whether the model is built without memory: where the job asks for that, and a transformers model of which the
        weights are read from files, so that no rank holds more of it than its part."""
        model, checkpoint, pipeline = self.training.model, self.training.checkpoint, self.job.parallelism.pipeline
        from_files = checkpoint is not None and checkpoint.initial_from is not None
        reads = model.name is ModelName.TRANSFORMERS and from_files
        # Layers that are timed must have values.
        timed = pipeline is not None and pipeline.split is PipelineSplit.TIME
        return model.meta_device or (reads and not timed)

    @property
    def saves_in_background(self) -> bool:
        """Whether checkpoints are written while training goes on."""
        return self.checkpoint_folder is not None and (self.training.checkpoint or Checkpoint()).asynchronous


def read_config(environment: Mapping[str, str] = os.environ) -> Config:
    """The Config of this process.

    Without RANK, WORLD_SIZE and the rest this is a world of one rank, so the module can be run by hand.
    Raises InvalidConfiguration naming the field or variable.
    """
    path = Path(environment.get(Env.CONFIG) or Path(CONFIG_DIR, CONFIG_FILE))
    job = read_job(path)
    world_size = _number(environment, Env.WORLD_SIZE, 1)
    rank = _number(environment, Env.RANK, 0)
    if not 0 <= rank < world_size:
        raise InvalidConfiguration(f"RANK is {rank}, expected 0 to {world_size - 1} with WORLD_SIZE {world_size}")
    if world_size > 1:
        for name in (Env.MASTER_ADDR, Env.MASTER_PORT):
            if not environment.get(name):
                raise InvalidConfiguration(f"{name} is not set, but WORLD_SIZE is {world_size}: where to meet rank 0?")
    master_host = environment.get(Env.MASTER_ADDR) or ""
    local_world_size = _number(environment, Env.LOCAL_WORLD_SIZE, world_size)
    if local_world_size < 1 or world_size % local_world_size:
        raise InvalidConfiguration(
            f"LOCAL_WORLD_SIZE is {local_world_size}, expected a divisor of WORLD_SIZE {world_size}: all pods have as"
            " many ranks"
        )
    mesh, batch = resolve(job, world_size, local_world_size)
    storage = environment.get(Env.STORAGE)
    report_dir = environment.get(Env.REPORT_DIR)
    metrics_dir = environment.get(Env.METRICS_DIR)
    checkpoint_folder = location(storage) / job.checkpoint_folder if storage else None
    beside = checkpoint_folder if isinstance(checkpoint_folder, Path) else None
    grace = environment.get(Env.GRACE_SECONDS)
    return Config(
        job=job,
        mesh=mesh,
        batch=batch,
        rank=rank,
        local_rank=_number(environment, Env.LOCAL_RANK, rank),
        world_size=world_size,
        local_world_size=local_world_size,
        master=f"{master_host}:{environment.get(Env.MASTER_PORT)}",
        attempt=_number(environment, Env.ATTEMPT, 1),
        generation=_number(environment, Env.GENERATION, 0),
        checkpoint_folder=checkpoint_folder,
        metrics_folder=Path(metrics_dir) if metrics_dir else beside,
        report_dir=Path(report_dir) if report_dir else None,
        pod_memory=tuple(map(Path, filter(None, environment.get(Env.MEMORY, "").split(":")))),
        grace_seconds=float(_number(environment, Env.GRACE_SECONDS, 0)) if grace else None,
        node=environment.get(Env.NODE_NAME) or socket.gethostname(),
        threads_given="OMP_NUM_THREADS" in environment,
        servers=(servers := _servers(job, environment)),
        token=read_token(path.parent, required=bool(servers) or (world_size > 1 and not is_loopback(master_host))),
    )


def _servers(job: JobConfig, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Addresses, where the job's parameters lie on servers."""
    if job.parallelism.data_parallel.mode is not DataParallelMode.PARAMETER_SERVER:
        return ()
    addresses = tuple(filter(None, environment.get(Env.PS_ADDRESSES, "").split(",")))
    if not addresses:
        raise InvalidConfiguration(f"{Env.PS_ADDRESSES} is not set, but the job's parameters lie on servers: where?")
    return addresses


def read_token(folder: Path, *, required: bool) -> str:
    """Return the job's token; "" where there is none and none is required. Raises InvalidConfiguration."""
    file = folder / TOKEN_FILE
    try:
        token = file.read_text().strip()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not required:
            return ""
        raise InvalidConfiguration(
            f"{file} cannot be read ({error.strerror}), expected the job's token beside {CONFIG_FILE}"
        ) from error
    if not token:
        raise InvalidConfiguration(
            f"{file} is empty, expected the job's token: a key that anybody knows keeps nobody out"
        )
    return token


def read_job(path: Path) -> JobConfig:
    """The job.json at `path`. Raises InvalidConfiguration naming the first wrong field."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidConfiguration(
            f"{path} cannot be read ({error.strerror}), expected the job's configuration; set {Env.CONFIG} to its path"
        ) from error
    try:
        return JobConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise InvalidConfiguration(f"{path}: `{field}`: {first['msg']}, found {first['input']!r:.80}") from error


def resolve(job: JobConfig, world_size: int, local_world_size: int = 1) -> tuple[Mesh, Batch]:
    """Layout and batch sizes of `world_size` ranks, `local_world_size` of them in each pod.

    Raises InvalidConfiguration for anything that `disttrain validate` refuses, so that a job.json that came another way
    is held to the same rules.
    """
    has_servers = job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER
    spec = JobSpec(
        workers=Workers(replicas=world_size // local_world_size, processes_per_pod=local_world_size),
        # How many there are is the environment's to say.
        parameter_servers=ParameterServers() if has_servers else None,
        parallelism=job.parallelism,
        training=job.training,
        # Whether there is storage is the environment's to say.
        storage=Storage(claim_name="given"),
    )
    problems = spec_problems(spec)
    if problems:
        raise InvalidConfiguration("; ".join(map(str, problems)))
    mesh = Mesh.of(job.parallelism, world_size)
    return mesh, resolve_batch(job.training, mesh.data_parallel, microbatches_of(job.parallelism))


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfiguration(f"{name} is {text!r}, expected a whole number") from error


def report_place(environment: Mapping[str, str] = os.environ) -> tuple[int, Path | None]:
    """Rank and report folder, known even where the configuration is wrong."""
    rank = environment.get(Env.RANK, "")
    folder = environment.get(Env.REPORT_DIR)
    return int(rank) if rank.isdigit() else 0, Path(folder) if folder else None
