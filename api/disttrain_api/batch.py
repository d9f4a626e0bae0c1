"""Batch arithmetic: globalBatchSize = microBatchSize x passes x data-parallel degree.

Passes are forward and backward passes of a rank: gradientAccumulationSteps x microbatches of the pipeline (1 without
one). Two of the three sizes may be absent, as long as one of the batch sizes is given.
"""

from dataclasses import dataclass

from disttrain_api.errors import LayoutError
from disttrain_api.training import Training

# The sentences, with their numbers; the API server says the same ones (rules/batch.py).
NO_SIZE = "`microBatchSize` or `globalBatchSize` must be given"
NO_MICRO = (
    "`globalBatchSize` {world} must be a multiple of gradientAccumulationSteps x data-parallel degree x pipeline"
    " microbatches, which is {accumulation} x {replicas} x {pipeline} = {product}"
)
NO_ACCUMULATION = (
    "`globalBatchSize` {world} must be a multiple of microBatchSize x data-parallel degree x pipeline microbatches,"
    " which is {micro} x {replicas} x {pipeline} = {product}"
)
ALL_SIZES = (
    "`globalBatchSize` {world} must equal microBatchSize x gradientAccumulationSteps x data-parallel degree x"
    " pipeline microbatches, which is {micro} x {accumulation} x {replicas} x {pipeline} = {product}"
)


@dataclass(frozen=True)
class Batch:
    """Sizes in samples."""

    micro: int
    accumulation: int
    world: int
    """Samples of all ranks in one optimizer step."""
    pipeline: int = 1
    """Microbatches in one pass through the pipeline; 1 without one."""

    @property
    def passes(self) -> int:
        """Microbatches of one replica in one optimizer step."""
        return self.accumulation * self.pipeline


@dataclass(frozen=True)
class Misfit:
    """The sentence of a violation, and its numbers."""

    sentence: str
    values: dict[str, int]


def find_misfit(training: Training, data_parallel: int, pipeline: int = 1) -> Misfit | None:
    """Return the problem of the batch sizes, or None if they fit each other, the data-parallel degree and the
    pipeline's microbatches.
    """
    micro, world = training.micro_batch_size, training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    if world is None:
        return Misfit(NO_SIZE, {}) if micro is None else None
    rest = data_parallel * pipeline
    values = {"world": world, "replicas": data_parallel, "pipeline": pipeline}
    if micro is None:
        values |= {"accumulation": accumulation or 1, "product": (accumulation or 1) * rest}
        return Misfit(NO_MICRO, values) if world % values["product"] else None
    if accumulation is None:
        values |= {"micro": micro, "product": micro * rest}
        return Misfit(NO_ACCUMULATION, values) if world % values["product"] else None
    values |= {"micro": micro, "accumulation": accumulation, "product": micro * accumulation * rest}
    return Misfit(ALL_SIZES, values) if world != values["product"] else None


def resolve_batch(training: Training, data_parallel: int, pipeline: int = 1) -> Batch:
    """Fill in what the manifest leaves out. Raises LayoutError with the numbers where they do not fit."""
    misfit = find_misfit(training, data_parallel, pipeline)
    if misfit is not None:
        raise LayoutError(misfit.sentence.format(**misfit.values))
    micro, world = training.micro_batch_size, training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    rest = data_parallel * pipeline
    if micro is None:
        assert world is not None  # find_misfit saw to it
        accumulation = accumulation or 1
        micro = world // (accumulation * rest)
    if accumulation is None:
        accumulation = 1 if world is None else world // (micro * rest)
    return Batch(micro=micro, accumulation=accumulation, world=micro * accumulation * rest, pipeline=pipeline)
