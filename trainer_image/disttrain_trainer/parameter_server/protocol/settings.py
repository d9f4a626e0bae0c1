"""What a job's config says about its servers."""

from dataclasses import dataclass
from pathlib import Path

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Compression, ParameterServer, Synchronization
from disttrain_api.training import Training
from disttrain_trainer.runtime.config import Config

SILENCE_SECONDS = 10.0
"""A worker that says nothing for so long counts as dead. It speaks every second, also while it computes."""


@dataclass(frozen=True)
class ServerConfig:
    """What a server knows from the job. index: of this server; workers: of the job."""

    index: int
    workers: int
    training: Training
    batch: Batch
    settings: ParameterServer
    silence: float = SILENCE_SECONDS
    snapshots: bool = False
    """Whether this server can go on from a snapshot: not where steps are updated as a whole, by all servers alike."""
    epoch: int = 1
    """Which life of this server of the attempt it is, from 1. Once a later one is known, nobody listens to it."""
    compression: Compression | None = None
    """Of what is pushed."""


def settings_of(config: Config) -> ParameterServer:
    """How workers and servers work together."""
    return config.job.parallelism.data_parallel.parameter_server or ParameterServer()


def goes_on_from_snapshots(config: Config) -> bool:
    """Whether a server may be started anew: it has a place for snapshots, and updates come one by one.

    Snapshots are files on a volume; an object store holds checkpoints alone.
    """
    is_volume = isinstance(config.checkpoint_folder, Path)
    return is_volume and not is_together(config)


def is_together(config: Config) -> bool:
    """Whether a step is one update."""
    return settings_of(config).synchronization is Synchronization.SYNC
