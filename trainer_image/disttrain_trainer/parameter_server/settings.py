"""What a job's config says about its servers."""

from pathlib import Path

from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_trainer.config import Config


def settings_of(config: Config) -> ParameterServer:
    """How workers and servers work together."""
    return config.job.parallelism.data_parallel.parameter_server or ParameterServer()


def goes_on_from_snapshots(config: Config) -> bool:
    """Whether a server but the first may be started anew: it has a place for snapshots, and updates come one by one.

    Snapshots are files on a volume; an object store holds checkpoints alone.
    """
    is_volume = isinstance(config.checkpoint_folder, Path)
    return is_volume and not is_together(config)


def is_together(config: Config) -> bool:
    """Whether a step is one update."""
    return settings_of(config).synchronization is Synchronization.SYNC
