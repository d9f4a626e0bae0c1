"""Rules for the requirements of each pipeline schedule, as in torch.distributed.pipelining."""

from collections.abc import Callable

from disttrain_api.compute import ActivationCheckpointing
from disttrain_api.parallelism import PipelineSchedule, PipelineSplit
from disttrain_api.pipeline import (
    ROUND_SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    SPLIT_BACKWARD_SCHEDULES,
    V_SCHEDULES,
    microbatches_of,
    rounds_of,
    schedule_of,
    stages_of,
    stages_per_rank,
)
from disttrain_api.rules.layout import MICROBATCHES, PIPELINE, SCHEDULE, STAGES, STAGES_PER_RANK
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec

_AT_LEAST_STAGES = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.DUAL_PIPE_V, PipelineSchedule.PIPE_DREAM_2BW)
# A list of one element is CEL's way to name a value; written out, the rule would be three times as long.
_ROUNDS_OF_M = f"(m / {PIPELINE} > 1 ? m / {PIPELINE} : 1)"
_LAYERS = "self.parallelism.pipeline.layersPerStage"
_HAS_LAYERS = "self.parallelism.?pipeline.?layersPerStage.hasValue()"
_SPLITS_BY_TIME = given("self.parallelism.?pipeline.?split", "''") + " == 'Time'"
_READS = ("spec.parallelism.pipelineParallelDegree", "spec.parallelism.pipeline")


def _degree(spec: JobSpec) -> int:
    return spec.parallelism.pipeline_parallel_degree or 1


def _one_of(schedules: tuple[PipelineSchedule, ...]) -> str:
    return f"{PIPELINE} > 1 && {SCHEDULE} in {[str(name) for name in schedules]}"


def _uses(spec: JobSpec, schedules: tuple[PipelineSchedule, ...]) -> bool:
    return _degree(spec) > 1 and schedule_of(spec.parallelism) in schedules


def _stages_per_rank_must_be(
    identifier: str, wanted: int, schedules: tuple[PipelineSchedule, ...], advice: str
) -> Rule:
    def check(spec: JobSpec) -> Values | None:
        stages = stages_per_rank(spec.parallelism)
        wrong = _uses(spec, schedules) and stages != wanted
        return when(wrong, schedule=str(schedule_of(spec.parallelism)), stages=stages)

    return Rule(
        id=identifier,
        path="spec.parallelism.pipeline",
        sentence=f"schedule '{{schedule}}' has {wanted} stage{'s' * (wanted > 1)} per rank, `stagesPerRank` is"
        f" {{stages}}: {advice}",
        check=check,
        cel=f"!({_one_of(schedules)}) || {STAGES_PER_RANK} == {wanted}",
        values={"schedule": SCHEDULE, "stages": STAGES_PER_RANK},
        reads=_READS,
    )


def _not_with_split_backward(
    what: str, path: str, name: str, reason: str, applies: Callable[[JobSpec], bool], cel: str
) -> Rule:
    return Rule(
        id=f"{what}WithSplitBackward",
        path=path,
        sentence=f"{name} conflicts with schedule '{{schedule}}', which computes gradients of inputs and"
        f" parameters separately: {reason}; use Interleaved1F1B",
        check=lambda spec: when(
            _uses(spec, SPLIT_BACKWARD_SCHEDULES) and applies(spec), schedule=str(schedule_of(spec.parallelism))
        ),
        cel=f"!({_one_of(SPLIT_BACKWARD_SCHEDULES)}) || !({cel})",
        values={"schedule": SCHEDULE},
        reads=(path, *_READS),
    )


def _too_few(spec: JobSpec) -> Values | None:
    microbatches, stages = microbatches_of(spec.parallelism), stages_of(spec.parallelism)
    wrong = _uses(spec, _AT_LEAST_STAGES) and microbatches < stages
    return when(wrong, schedule=str(schedule_of(spec.parallelism)), microbatches=microbatches, stages=stages)


def _no_whole_rounds(spec: JobSpec) -> Values | None:
    microbatches = microbatches_of(spec.parallelism)
    rounds = rounds_of(microbatches, _degree(spec))
    wrong = _uses(spec, ROUND_SCHEDULES) and microbatches % rounds > 0
    return when(wrong, schedule=str(schedule_of(spec.parallelism)), microbatches=microbatches, rounds=rounds)


def _other_number_of_stages(spec: JobSpec) -> Values | None:
    given = spec.parallelism.pipeline.layers_per_stage if spec.parallelism.pipeline is not None else None
    stages = stages_of(spec.parallelism)
    if given is None or _degree(spec) == 1 or len(given) == stages:
        return None
    return {"given": len(given), "stages": stages}


def _timed_without_memory(spec: JobSpec) -> Values | None:
    pipeline = spec.parallelism.pipeline
    timed = pipeline is not None and pipeline.split is PipelineSplit.TIME
    return when(timed and spec.training is not None and spec.training.model.meta_device)


PIPELINE_RULES = (
    Rule(
        id="PipelineNeedsDegree",
        path="spec.parallelism.pipeline",
        sentence="`pipeline` needs `pipelineParallelDegree` greater than 1",
        check=lambda spec: when(spec.parallelism.pipeline is not None and _degree(spec) == 1),
        cel=f"!has(self.parallelism.pipeline) || {PIPELINE} > 1",
        reads=_READS,
    ),
    _stages_per_rank_must_be(
        "OneStagePerRank", 1, SINGLE_STAGE_SCHEDULES, "remove it, or use Interleaved1F1B or LoopedBFS"
    ),
    _stages_per_rank_must_be("TwoStagesPerRank", 2, V_SCHEDULES, "remove it, or use InterleavedZeroBubble"),
    Rule(
        id="MicrobatchesFillStages",
        path="spec.parallelism.pipeline",
        sentence="schedule '{schedule}' needs at least as many `microbatches` as stages: {microbatches} are fewer"
        " than {stages}",
        check=_too_few,
        cel=f"!({_one_of(_AT_LEAST_STAGES)}) || {MICROBATCHES} >= {STAGES}",
        values={"schedule": SCHEDULE, "microbatches": MICROBATCHES, "stages": STAGES},
        reads=_READS,
    ),
    Rule(
        id="MicrobatchesInRounds",
        path="spec.parallelism.pipeline",
        sentence="schedule '{schedule}' takes microbatches in rounds: {microbatches} `microbatches` must be a"
        " multiple of microbatches / pipelineParallelDegree, which is {rounds}",
        check=_no_whole_rounds,
        cel=f"!({_one_of(ROUND_SCHEDULES)}) || [{MICROBATCHES}].all(m, m % {_ROUNDS_OF_M} == 0)",
        values={
            "schedule": SCHEDULE,
            "microbatches": MICROBATCHES,
            "rounds": f"[{MICROBATCHES}].map(m, {_ROUNDS_OF_M})[0]",
        },
        reads=_READS,
    ),
    Rule(
        id="LayersOfEveryStage",
        path="spec.parallelism.pipeline",
        sentence="`layersPerStage` has {given} numbers, there are {stages} stages: set one for each",
        check=_other_number_of_stages,
        cel=f"{PIPELINE} == 1 || !({_HAS_LAYERS}) || {_LAYERS}.size() == {STAGES}",
        values={"given": f"{_LAYERS}.size()", "stages": STAGES},
        reads=_READS,
    ),
    Rule(
        id="LayersOrSplit",
        path="spec.parallelism.pipeline",
        scope="spec.parallelism",
        sentence="`layersPerStage` already splits the layers: remove `split`",
        check=lambda spec: when(
            spec.parallelism.pipeline is not None
            and spec.parallelism.pipeline.layers_per_stage is not None
            and spec.parallelism.pipeline.split is not None
        ),
        cel="!has(self.pipeline) || !has(self.pipeline.layersPerStage) || !has(self.pipeline.split)",
        reads=("spec.parallelism.pipeline",),
    ),
    Rule(
        id="TimeNeedsMemory",
        path="spec.parallelism.pipeline",
        sentence="`split` Time measures layers, which `training.model.metaDevice` builds without memory: use"
        " Parameters",
        check=_timed_without_memory,
        cel=f"!({_SPLITS_BY_TIME}) || !has(self.training) || !self.training.model.metaDevice",
        reads=("spec.parallelism.pipeline", "spec.training.model.metaDevice"),
    ),
    _not_with_split_backward(
        "Selective",
        "spec.training.activationCheckpointing",
        "activationCheckpointing Selective",
        "it recomputes a layer only once; Full works",
        lambda spec: (
            spec.training is not None and spec.training.activation_checkpointing is ActivationCheckpointing.SELECTIVE
        ),
        "has(self.training) && self.training.activationCheckpointing == 'Selective'",
    ),
    _not_with_split_backward(
        "Compile",
        "spec.training.compile",
        "`compile`",
        "compiled layers have one backward pass",
        lambda spec: spec.training is not None and spec.training.compile,
        "has(self.training) && self.training.compile",
    ),
)
