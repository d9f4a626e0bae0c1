"""`spec.parallelism`: how the work is cut over the ranks. Names are torchtitan's."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel
from disttrain_api.relaxed import Bmuf, LocalSgd

# Bounds keep the product of all degrees within 64 bits, also in CEL.
ReplicateDegree = Annotated[int, Field(ge=1, le=100_000)]
ShardDegree = Annotated[int, Field(ge=1, le=10_000)]
Degree = Annotated[int, Field(ge=1, le=1024)]


class DataParallelMode(StrEnum):
    """How data-parallel replicas stay equal."""

    ALL_REDUCE = "AllReduce"
    PARAMETER_SERVER = "ParameterServer"
    LOCAL_SGD = "LocalSGD"
    BMUF = "BMUF"


class DeviceMode(StrEnum):
    """Use of several devices in one process."""

    REPLICATE = "Replicate"
    PLACE = "Place"


class PipelineSchedule(StrEnum):
    """Order in which the stages of a pipeline compute microbatches; names are torch.distributed.pipelining's, but for
    the last two."""

    GPIPE = "GPipe"
    ONE_F_ONE_B = "1F1B"
    INTERLEAVED_1F1B = "Interleaved1F1B"
    LOOPED_BFS = "LoopedBFS"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZBV_ZERO_BUBBLE = "ZBVZeroBubble"
    DUAL_PIPE_V = "DualPipeV"
    PIPE_DREAM = "PipeDream"
    PIPE_DREAM_2BW = "PipeDream2BW"


class PipelineSplit(StrEnum):
    """What is made equal among the stages."""

    EVEN = "Even"
    PARAMETERS = "Parameters"
    TIME = "Time"


class ContextParallelMethod(StrEnum):
    """How attention sees tokens that other ranks have."""

    ULYSSES = "Ulysses"
    RING = "Ring"


class AllReduce(StrEnum):
    """Who sends what to whom when gradients are summed."""

    BACKEND = "Backend"
    RING = "Ring"
    TREE = "Tree"
    CENTRAL = "Central"


class CompressionName(StrEnum):
    """What is sent of a gradient."""

    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "Int8"
    ONE_BIT = "OneBit"
    TOP_K = "TopK"
    RANDOM_K = "RandomK"
    POWER_SGD = "PowerSGD"


class Compression(ApiModel):
    """Gradient compression. OneBit, TopK, RandomK and PowerSGD add the error to the next gradient."""

    name: CompressionName
    """A number format, 8 bits or 1 bit each, the largest or random numbers, or low-rank matrices."""
    ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """TopK and RandomK only: numbers sent / numbers. Absent: 0.01."""
    rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    """PowerSGD only: rank of the matrices. Absent: 4."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] | None = None
    """Steps in which OneBit and PowerSGD send everything and the ratio falls from 1 to its value. Absent: 0."""
    momentum_correction: Annotated[float, Field(ge=0, lt=1)] | None = None
    """TopK and RandomK only: SGD momentum, applied before numbers are chosen. Absent: 0."""


class Synchronization(StrEnum):
    """When parameter servers apply what workers push."""

    SYNC = "Sync"
    ASYNC = "Async"
    BOUNDED_STALENESS = "BoundedStaleness"


class Pushed(StrEnum):
    """What workers push to parameter servers."""

    GRADIENTS = "Gradients"
    PARAMETERS = "Parameters"


class GroupReduce(StrEnum):
    """Who sums gradients before they go to parameter servers."""

    WITHIN_GROUP = "WithinGroup"


class ParameterServer(ApiModel):
    """How workers use parameter servers."""

    push: Pushed = Pushed.GRADIENTS
    """Gradients: servers update. Parameters: workers update and push the change, which servers average."""
    synchronization: Synchronization = Synchronization.SYNC
    """Sync: one update per step, as AllReduce. Async: one per worker's part of the batch, as it arrives.
    BoundedStaleness: as Async, but no worker runs far ahead."""
    staleness: Annotated[int, Field(ge=0, le=1_000_000)] | None = None
    """BoundedStaleness only: parts a worker may be ahead of the slowest one. Absent: 4."""
    staleness_aware_rate: bool | None = None
    """Not for Sync: the learning rate of an update is divided by its staleness. Absent: false."""
    snapshot_interval: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Not for Sync; needs a volume: updates of a server between two snapshots. Absent: 100."""
    group_reduce: GroupReduce | None = None
    """WithinGroup: the ranks of a pod are one worker, which sums its gradients and pushes once; they may share a model.
    Absent: each rank is a worker."""


class DataParallel(ApiModel):
    """How data-parallel replicas stay equal."""

    mode: DataParallelMode = DataParallelMode.ALL_REDUCE
    """AllReduce sums gradients over all replicas in every step. LocalSGD and BMUF: replicas train alone and
    periodically average their parameters. ParameterServer: servers hold the parameters, workers push gradients to
    them."""
    sync_batch_norm: bool = False
    """BatchNorm layers use the batches of all replicas, not of each separately."""
    local_sgd: Annotated[LocalSgd | None, Field(alias="localSGD")] = None
    """Settings of LocalSGD. Absent: its defaults."""
    bmuf: Bmuf | None = None
    """Settings of BMUF. Absent: its defaults."""
    parameter_server: ParameterServer | None = None
    """ParameterServer only. Absent: Sync."""
    all_reduce: AllReduce = AllReduce.BACKEND
    """Backend: that of gloo or NCCL. Ring, Tree, Central: point-to-point, for study."""
    compression: Compression | None = None
    """Absent: gradients are sent as they are."""
    static_graph: bool = False
    """Every step uses the same parameters, equally often: DDP does not search for unused ones."""
    find_unused_parameters: bool = False
    """Search every step for unused parameters, also where the first microbatch has none."""

    @property
    def relaxed(self) -> LocalSgd | Bmuf | None:
        """Settings of replicas that train alone and average their parameters now and then; None in other modes."""
        match self.mode:
            case DataParallelMode.LOCAL_SGD:
                return self.local_sgd or LocalSgd()
            case DataParallelMode.BMUF:
                return self.bmuf or Bmuf()
            case _:
                return None


class Pipeline(ApiModel):
    """Pipeline settings."""

    schedule: PipelineSchedule | None = None
    """PipeDream and PipeDream2BW keep the pipeline full: gradients are stale. Absent: 1F1B."""
    vertical_sync: bool | None = None
    """PipeDream only: a microbatch uses the same version of the weights in every stage. Absent: false."""
    microbatches: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Microbatches in one pass through the pipeline. Absent: as many as stages; 1 with PipeDream."""
    stages_per_rank: Annotated[int, Field(ge=1, le=64)] | None = None
    """Absent: 1 for GPipe, 1F1B and PipeDream*, 2 for the others."""
    split: PipelineSplit | None = None
    """What is balanced between stages: the number of layers, of parameters, or the time measured at the start. Absent:
    Even."""
    layers_per_stage: Annotated[list[Annotated[int, Field(ge=1)]], Field(max_length=1024)] | None = None
    """Layers of each stage, instead of `split`."""


class Parallelism(ApiModel):
    """Degrees of the mesh. The product of all except the expert degree must equal the world size."""

    data_parallel_replicate_degree: ReplicateDegree | None = None
    """Copies of the model, each on its own part of the batch. Absent: the world size / the other degrees."""
    data_parallel_shard_degree: ShardDegree | None = None
    """Ranks that share one copy of the parameters, gradients and optimizer state. Absent: 1."""
    context_parallel_degree: Degree | None = None
    """Ranks that share each sequence: each computes a part of it. Absent: 1."""
    context_parallel_method: ContextParallelMethod | None = None
    """Ulysses: ranks exchange tokens for heads. Ring: keys and values travel around the ranks. Absent: Ulysses."""
    tensor_parallel_degree: Degree | None = None
    """Ranks that share each layer. Absent: 1."""
    sequence_parallel: bool | None = None
    """With tensor parallelism: also shard activations between layers along the sequence. Absent: false."""
    async_tensor_parallel: bool | None = None
    """With sequenceParallel and compile: layers compute while they send, on GPUs that reach each other's memory.
    Absent: false."""
    vocabulary_parallel: bool | None = None
    """With tensor parallelism: logits and loss stay sharded along the vocabulary. Absent: false."""
    pipeline_parallel_degree: Degree | None = None
    """Ranks that the layers are split over, in sequence. Absent: 1."""
    pipeline: Pipeline | None = None
    """Absent: 1F1B, one stage per rank, as many microbatches as stages."""
    expert_parallel_degree: Degree | None = None
    """Ranks that the experts are spread over, part of shard x context x tensor. Absent: 1."""
    devices_per_process: Annotated[int, Field(ge=1, le=64)] | None = None
    """Devices that each process computes on; on CPUs logical ones. Absent: 1."""
    device_mode: DeviceMode | None = None
    """With several devices per process. Replicate: each has a copy of the model and a part of the batch. Place: each
    has some layers. Absent: Replicate."""
    data_parallel: DataParallel = DataParallel()
    """How data-parallel replicas stay equal."""
