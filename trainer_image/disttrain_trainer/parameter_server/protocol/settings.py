"""What a job's config says about its servers and their workers."""

from pathlib import Path

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_trainer.runtime.config import Config


def settings_of(config: Config) -> ParameterServer:
    """How workers and servers work together."""
    return config.job.parallelism.data_parallel.parameter_server or ParameterServer()


def resumes_from_snapshots(config: Config) -> bool:
    """Whether a server may be started anew: it has a place for snapshots, and updates come one by one.

    Snapshots are files on a volume; an object store holds checkpoints alone.
    """
    is_volume = isinstance(config.checkpoint_folder, Path)
    return is_volume and not is_together(config)


def is_together(config: Config) -> bool:
    """Whether a step is one update."""
    return settings_of(config).synchronization is Synchronization.SYNC


def group_mesh(config: Config) -> Mesh:
    """The mesh of the ranks that are one worker; of the job's config or of a group's."""
    return Mesh.of_group(config.job.parallelism, config.local_world_size)


def workers_of(config: Config) -> int:
    """How many workers the servers know: each is a group of ranks, which may be one. config: of the job."""
    return config.world_size // group_mesh(config).world_size


def worker_of(config: Config) -> int:
    """The worker that this rank belongs to. config: of the job."""
    return config.rank // group_mesh(config).world_size
