"""`spec.parallelism`: how the work is cut over the ranks. Names are torchtitan's."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel

# Bounds keep the product of all degrees within 64 bits, also in CEL.
ReplicateDegree = Annotated[int, Field(ge=1, le=100_000)]
ShardDegree = Annotated[int, Field(ge=1, le=10_000)]
Degree = Annotated[int, Field(ge=1, le=1024)]


class DataParallelMode(StrEnum):
    """How data-parallel replicas are kept equal."""

    ALL_REDUCE = "AllReduce"
    PARAMETER_SERVER = "ParameterServer"


class DeviceMode(StrEnum):
    """What several devices of one process do."""

    REPLICATE = "Replicate"
    PLACE = "Place"


class DataParallel(ApiModel):
    """How data-parallel replicas are kept equal."""

    mode: DataParallelMode = DataParallelMode.ALL_REDUCE
    """AllReduce sums gradients over all replicas in every step. ParameterServer is not built yet."""
    sync_batch_norm: bool = False
    """BatchNorm layers look at the batches of all replicas together, not of each alone."""


class Parallelism(ApiModel):
    """Degrees of the mesh. The product of all degrees but the expert one must equal the world size."""

    data_parallel_replicate_degree: ReplicateDegree | None = None
    """Copies of the model, each on its own part of the batch. Absent: what the others leave of the world size."""
    data_parallel_shard_degree: ShardDegree | None = None
    """Ranks that share one copy of the parameters, gradients and optimizer state. Absent: 1."""
    context_parallel_degree: Degree | None = None
    """Ranks that share one sequence. Absent: 1."""
    tensor_parallel_degree: Degree | None = None
    """Ranks that share each layer. Absent: 1."""
    sequence_parallel: bool | None = None
    """With tensor parallelism: what lies between the shared layers is cut along the sequence. Absent: false."""
    vocabulary_parallel: bool | None = None
    """With tensor parallelism: the logits stay cut along the vocabulary, the loss too. Absent: false."""
    pipeline_parallel_degree: Degree | None = None
    """Stages that the layers are cut into. Absent: 1."""
    expert_parallel_degree: Degree | None = None
    """Ranks that the experts are spread over, carved out of shard x context x tensor. Absent: 1."""
    devices_per_process: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices that each process computes on; on CPUs logical ones. Absent: 1."""
    device_mode: DeviceMode | None = None
    """With several devices per process. Replicate: a copy of the model on each, which share the batch. Place: each has
    some of the layers. Absent: Replicate."""
    data_parallel: DataParallel = DataParallel()
    """How data-parallel replicas are kept equal."""
