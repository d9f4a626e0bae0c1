"""Batch arithmetic: globalBatchSize = microBatchSize x gradientAccumulationSteps x data-parallel degree."""

from dataclasses import dataclass

from disttrain_api.errors import LayoutError
from disttrain_api.training import Training


@dataclass(frozen=True)
class Batch:
    """Sizes in samples."""

    micro: int
    accumulation: int
    world: int
    """Samples of all ranks in one optimizer step."""


def resolve_batch(training: Training, data_parallel: int) -> Batch:
    """Fill in what the manifest leaves out. Raises LayoutError with the numbers where they do not fit."""
    micro, world = training.micro_batch_size, training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    if micro is None and world is None:
        raise LayoutError("microBatchSize or globalBatchSize must be given")
    if micro is None:
        assert world is not None
        accumulation = accumulation or 1
        micro = world // (accumulation * data_parallel)
    if accumulation is None:
        accumulation = 1 if world is None else world // (micro * data_parallel)
    product = micro * accumulation * data_parallel
    if world is not None and product != world:
        raise LayoutError(
            f"globalBatchSize {world} must equal microBatchSize x gradientAccumulationSteps x data-parallel degree, "
            f"which is {micro} x {accumulation} x {data_parallel} = {product}"
        )
    return Batch(micro=micro, accumulation=accumulation, world=product)
