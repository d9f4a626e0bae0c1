"""Arithmetic of pipelines: how many stages, how many microbatches, and which pipeline index holds which stage."""

from disttrain_api.parallelism import Parallelism, PipelineSchedule

V_SCHEDULES = (PipelineSchedule.ZBV_ZERO_BUBBLE, PipelineSchedule.DUAL_PIPE_V)
"""Their stages lie like a V: the first and the last one on index 0."""
FLUSHLESS_SCHEDULES = (PipelineSchedule.PIPE_DREAM, PipelineSchedule.PIPE_DREAM_2BW)
"""Their pipelines stay full from update to update, so gradients are those of older weights."""
SINGLE_STAGE_SCHEDULES = (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B, *FLUSHLESS_SCHEDULES)
SPLIT_BACKWARD_SCHEDULES = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, *V_SCHEDULES)
"""Their backward pass comes in two parts: gradients of the inputs, and later those of the parameters."""
ROUND_SCHEDULES = (PipelineSchedule.INTERLEAVED_1F1B, PipelineSchedule.INTERLEAVED_ZERO_BUBBLE)
"""Their microbatches come in rounds of about as many as there are ranks."""


def schedule_of(parallelism: Parallelism) -> PipelineSchedule:
    """The schedule; 1F1B where none is named."""
    given = parallelism.pipeline.schedule if parallelism.pipeline is not None else None
    return given or PipelineSchedule.ONE_F_ONE_B


def is_flushless(parallelism: Parallelism) -> bool:
    """Whether there is a pipeline, and it stays full from update to update."""
    return (parallelism.pipeline_parallel_degree or 1) > 1 and schedule_of(parallelism) in FLUSHLESS_SCHEDULES


def stages_per_rank(parallelism: Parallelism) -> int:
    """Return the stages per rank: as given, else 1 for the schedules of one stage per rank and 2 for the others."""
    given = parallelism.pipeline.stages_per_rank if parallelism.pipeline is not None else None
    return given or (1 if schedule_of(parallelism) in SINGLE_STAGE_SCHEDULES else 2)


def stages_of(parallelism: Parallelism) -> int:
    """Number of stages; 1 without a pipeline."""
    degree = parallelism.pipeline_parallel_degree or 1
    return 1 if degree == 1 else degree * stages_per_rank(parallelism)


def microbatches_of(parallelism: Parallelism) -> int:
    """Microbatches in one pass through the pipeline; as many as stages where not given. 1 without a pipeline, and with
    PipeDream, which updates after each.
    """
    if (parallelism.pipeline_parallel_degree or 1) == 1:
        return 1
    given = parallelism.pipeline.microbatches if parallelism.pipeline is not None else None
    return given or (1 if schedule_of(parallelism) is PipelineSchedule.PIPE_DREAM else stages_of(parallelism))


def rounds_of(microbatches: int, degree: int) -> int:
    """Rounds that the interleaved schedules make of so many microbatches."""
    return max(1, microbatches // degree)


def index_of_stage(parallelism: Parallelism) -> tuple[int, ...]:
    """The pipeline index that holds each stage: in turn, or there and back for the V schedules."""
    degree = parallelism.pipeline_parallel_degree or 1
    there = range(degree)
    if schedule_of(parallelism) in V_SCHEDULES:
        return (*there, *reversed(there))
    return (*there,) * (stages_of(parallelism) // degree)


def output_index(parallelism: Parallelism) -> int:
    """The pipeline index that holds the last stage, where outputs and loss are."""
    return 0 if (parallelism.pipeline_parallel_degree or 1) == 1 else index_of_stage(parallelism)[-1]
