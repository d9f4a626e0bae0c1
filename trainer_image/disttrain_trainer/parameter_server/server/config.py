"""Server settings of a job's config."""

from dataclasses import dataclass

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Compression, ParameterServer
from disttrain_api.training import Training

HEARTBEAT_TIMEOUT_SECONDS = 10.0
"""A worker that says nothing for so long counts as dead. It speaks every second, also while it computes."""


@dataclass(frozen=True)
class ServerConfig:
    """Settings of a server. index: of this server; workers: of the job."""

    index: int
    workers: int
    training: Training
    batch: Batch
    settings: ParameterServer
    heartbeat_timeout: float = HEARTBEAT_TIMEOUT_SECONDS
    snapshots: bool = False
    """Whether this server can go on from a snapshot: not where steps are updated as a whole, by all servers alike."""
    incarnation: int = 1
    """Counts the starts of this server in the attempt, from 1. Once a later one is known, peers ignore this one."""
    compression: Compression | None = None
    """How workers compress what they push."""
