"""The layouts that a job's model could be trained in on as many ranks, with the same global batch. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from disttrain_api.batch import resolve_batch
from disttrain_api.compute import ActivationCheckpointing
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallel, DataParallelMode, Parallelism, Pipeline, PipelineSchedule
from disttrain_api.pipeline import SINGLE_STAGE_SCHEDULES, microbatches_of
from disttrain_api.spec import DistTrainingJob, JobSpec
from disttrain_api.validate import spec_problems

SCHEDULES = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED_1F1B, PipelineSchedule.ZBV_ZERO_BUBBLE)
"""Those that are tried. GPipe has the bubble of 1F1B and holds more; the others are near one of the three."""
MICROBATCHES_PER_RANK = (1, 2, 4)
"""In one pass through a pipeline, over its ranks."""
MOST_TENSOR = 8
"""Ranks of a tensor group where pods have one: layers that are cut further are too small for the messages."""


@dataclass(frozen=True)
class Layout:
    """A way to train."""

    parallelism: Parallelism
    recompute: bool
    micro_batch_size: int
    accumulation: int

    def applied_to(self, job: DistTrainingJob) -> DistTrainingJob:
        """Return the job in this layout."""
        training = job.spec.training
        assert training is not None
        changes: dict[str, Any] = {
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.accumulation,
        }
        kind = ActivationCheckpointing.FULL if self.recompute else ActivationCheckpointing.NONE
        if self.recompute != (training.activation_checkpointing is not ActivationCheckpointing.NONE):
            changes["activation_checkpointing"] = kind
        spec = job.spec.model_copy(
            update={"parallelism": self.parallelism, "training": training.model_copy(update=changes)}
        )
        return job.model_copy(update={"spec": spec})

    def describe(self, ranks: int) -> str:
        """Return it in a few words: "pp2 x fsdp4, 1F1B, 8 microbatches, recomputed"."""
        parts = [Mesh.of(self.parallelism, ranks).describe()]
        if self.parallelism.pipeline is not None and self.parallelism.pipeline.schedule is not None:
            parts += [
                self.parallelism.pipeline.schedule.value,
                f"{self.parallelism.pipeline.microbatches} microbatches",
            ]
        if self.accumulation > 1:
            parts.append(f"{self.accumulation} accumulated")
        return ", ".join([*parts, "recomputed"] if self.recompute else parts)


def samples_of(spec: JobSpec) -> int:
    """Return the samples of a step of the job as it is."""
    assert spec.training is not None
    mesh = Mesh.of(spec.parallelism, spec.world_size)
    return resolve_batch(spec.training, mesh.data_parallel, microbatches_of(spec.parallelism)).world


def refusal(spec: JobSpec) -> str | None:
    """Why no other layouts are looked for; None where they are."""
    if spec.training is None:
        return "the job has a command of its own, whose layout is not known"
    mode = spec.parallelism.data_parallel.mode
    if mode is not DataParallelMode.ALL_REDUCE:
        return f"mode {mode.value} trains otherwise than layouts of AllReduce do, and is not compared with them"
    return None


def layouts_of(job: DistTrainingJob) -> list[Layout]:
    """Return the layouts that the rules allow, those of fewer kinds of parallelism first.

    What the job says of context and expert parallelism stays. Recomputation is as in the job; see `sparing`.
    """
    spec = job.spec
    assert spec.training is not None
    recompute = spec.training.activation_checkpointing is not ActivationCheckpointing.NONE
    samples = samples_of(spec)
    found = []
    for parallelism in _parallelisms(spec):
        mesh = Mesh.of(parallelism, spec.world_size)
        passes = mesh.data_parallel * microbatches_of(parallelism)
        if samples % passes == 0:
            found.append(Layout(parallelism, recompute, samples // passes, 1))
    allowed = [one for one in found if not spec_problems(one.applied_to(job).spec)]
    return sorted(allowed, key=lambda one: _kinds(Mesh.of(one.parallelism, spec.world_size)))


def sparing(layout: Layout) -> Iterator[Layout]:
    """Yield what the layout could do to need less memory, the cheapest first: recompute, and smaller microbatches."""
    if not layout.recompute:
        yield Layout(layout.parallelism, True, layout.micro_batch_size, layout.accumulation)
    for parts in (2, 4, 8, 16):
        if layout.micro_batch_size % parts == 0:
            micro, accumulation = layout.micro_batch_size // parts, layout.accumulation * parts
            yield Layout(layout.parallelism, True, micro, accumulation)


def pipeline_ranks(job: DistTrainingJob) -> list[int]:
    """Return the ranks whose needs differ: of a pipeline the first and the last one, else one for all."""
    mesh = Mesh.of(job.spec.parallelism, job.spec.world_size)
    return sorted({0, mesh.rank(pipeline=mesh.pipeline - 1)})


def _parallelisms(spec: JobSpec) -> Iterator[Parallelism]:
    given, ranks, pod = spec.parallelism, spec.world_size, spec.workers.ranks_per_pod
    rest = ranks // (given.context_parallel_degree or 1)
    most_tensor = min(pod if pod > 1 else MOST_TENSOR, MOST_TENSOR)
    for tensor in (degree for degree in _divisors(rest) if degree <= most_tensor):
        for pipeline in _divisors(rest // tensor):
            for shard in _divisors(rest // tensor // pipeline):
                base: dict[str, Any] = {
                    "data_parallel_replicate_degree": None,
                    "data_parallel_shard_degree": shard if shard > 1 else None,
                    "tensor_parallel_degree": tensor if tensor > 1 else None,
                    "sequence_parallel": given.sequence_parallel if tensor > 1 else None,
                    "async_tensor_parallel": given.async_tensor_parallel if tensor > 1 else None,
                    "vocabulary_parallel": given.vocabulary_parallel if tensor > 1 else None,
                    "pipeline_parallel_degree": pipeline if pipeline > 1 else None,
                    "pipeline": None,
                }
                if shard * tensor * pipeline > 1:
                    # What the job says of DDP alone is said where DDP sums the gradients.
                    kept = DataParallel(sync_batch_norm=given.data_parallel.sync_batch_norm)
                    base |= {} if kept == given.data_parallel else {"data_parallel": kept}
                for settings in _pipelines(pipeline):
                    yield given.model_copy(update=base | {"pipeline": settings})


def _pipelines(degree: int) -> Iterator[Pipeline | None]:
    if degree == 1:
        yield None
        return
    for schedule in SCHEDULES:
        stages = degree if schedule in SINGLE_STAGE_SCHEDULES else 2 * degree
        for count in sorted({times * degree for times in MICROBATCHES_PER_RANK} | {stages}):
            yield Pipeline(schedule=schedule, microbatches=count)


def _kinds(mesh: Mesh) -> tuple[int, int]:
    degrees = (mesh.shard, mesh.tensor, mesh.pipeline)
    return sum(degree > 1 for degree in degrees), mesh.tensor * mesh.pipeline


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]
