"""Pipelines that cannot be, and some that can."""

from collections.abc import Mapping
from typing import Any

from tests.builders import merge
from tests.refusals.refusal import Refusal
from tests.refusals.servers import on_servers

PIPELINE = "spec.parallelism.pipeline"


def piped(training: Mapping[str, Any] | None = None, **pipeline: Any) -> Mapping[str, Any]:
    """A pipeline over two ranks of a model with layers enough."""
    model = {"model": {"config": {"hiddenSizes": [8] * 7}}}
    return {
        "parallelism": {"pipelineParallelDegree": 2, "pipeline": pipeline},
        "training": {**model, **(training or {})},
    }


PIPELINE_REFUSALS = (
    Refusal(
        "PipelineNeedsDegree",
        PIPELINE,
        "`pipeline` needs `pipelineParallelDegree` greater than 1",
        {"parallelism": {"pipeline": {"microbatches": 4}}},
    ),
    Refusal(
        "OneStagePerRank",
        PIPELINE,
        "schedule 'GPipe' has 1 stage per rank, `stagesPerRank` is 2: remove it, or use Interleaved1F1B or LoopedBFS",
        piped(schedule="GPipe", stagesPerRank=2),
    ),
    Refusal(
        "TwoStagesPerRank",
        PIPELINE,
        "schedule 'ZBVZeroBubble' has 2 stages per rank, `stagesPerRank` is 3: remove it, or use InterleavedZeroBubble",
        piped(schedule="ZBVZeroBubble", stagesPerRank=3),
    ),
    *(
        Refusal(
            "MicrobatchesFillStages",
            PIPELINE,
            f"schedule '{schedule}' needs at least as many `microbatches` as stages: {microbatches} are fewer than"
            f" {stages}",
            piped(schedule=schedule, microbatches=microbatches),
        )
        for schedule, microbatches, stages in (("1F1B", 1, 2), ("DualPipeV", 3, 4))
    ),
    *(
        Refusal(
            "MicrobatchesInRounds",
            PIPELINE,
            f"schedule '{schedule}' takes microbatches in rounds: 7 `microbatches` must be a multiple of microbatches /"
            " pipelineParallelDegree, which is 3",
            piped(schedule=schedule, microbatches=7),
        )
        for schedule in ("Interleaved1F1B", "InterleavedZeroBubble")
    ),
    Refusal(
        "LayersOfEveryStage",
        PIPELINE,
        "`layersPerStage` has 3 numbers, there are 2 stages: set one for each",
        piped(layersPerStage=[1, 2, 1]),
    ),
    Refusal(
        "LayersOrSplit",
        PIPELINE,
        "`layersPerStage` already splits the layers: remove `split`",
        piped(layersPerStage=[1, 2], split="Even"),
    ),
    Refusal(
        "TimeNeedsMemory",
        PIPELINE,
        "`split` Time measures layers, which `training.model.metaDevice` builds without memory: use Parameters",
        {
            "parallelism": {"pipelineParallelDegree": 2, "pipeline": {"split": "Time"}},
            "training": {"model": {"name": "gpt", "metaDevice": True}, "data": {"name": "text"}},
        },
    ),
    *(
        Refusal(
            f"{what}WithSplitBackward",
            f"spec.training.{path}",
            f"{name} conflicts with schedule 'ZBVZeroBubble', which computes gradients of inputs and"
            f" parameters separately: {reason}; use Interleaved1F1B",
            piped(training, schedule="ZBVZeroBubble"),
        )
        for what, path, name, reason, training in (
            ("Compile", "compile", "`compile`", "compiled layers have one backward pass", {"compile": True}),
            (
                "Selective",
                "activationCheckpointing",
                "activationCheckpointing Selective",
                "it recomputes a layer only once; Full works",
                {"activationCheckpointing": "Selective"},
            ),
        )
    ),
)

FLUSHLESS_REFUSALS = (
    Refusal(
        "VerticalSyncNeedsPipeDream",
        PIPELINE,
        "`verticalSync` is a setting of schedule PipeDream: remove it",
        piped(schedule="PipeDream2BW", verticalSync=True),
    ),
    Refusal(
        "VerticalSyncNeedsPipeDream",
        PIPELINE,
        "`verticalSync` is a setting of schedule PipeDream: remove it",
        piped(verticalSync=False),
    ),
    Refusal(
        "PipeDreamHasNoBatches",
        PIPELINE,
        "schedule 'PipeDream' updates after every microbatch, `microbatches` is 4: remove it, or use PipeDream2BW",
        piped(schedule="PipeDream", microbatches=4),
    ),
    *(
        Refusal(
            "FlushlessStagesAreWhole",
            PIPELINE,
            f"schedule '{schedule}' keeps versions of a stage's whole weights, which `{cut}` splits: use replicas, or"
            " 1F1B",
            merge(piped(training, schedule=schedule), {"parallelism": {cut: 2} if cut in degrees else {}, **workers}),
        )
        for degrees in (("dataParallelShardDegree", "tensorParallelDegree"),)
        for schedule, cut, training, workers in (
            ("PipeDream", "dataParallelShardDegree", {}, {"workers": {"replicas": 4}}),
            ("PipeDream2BW", "tensorParallelDegree", {}, {"workers": {"replicas": 4}}),
            ("PipeDream", "offload.parameters", {"offload": {"parameters": True}}, {}),
        )
    ),
    Refusal(
        "FlushlessWithServers",
        PIPELINE,
        "stages of PipeDream and PipeDream2BW update weights, which `mode` ParameterServer leaves to servers: use 1F1B",
        merge(
            merge(piped(schedule="PipeDream"), on_servers(groupReduce="WithinGroup")),
            {"workers": {"replicas": 1, "processesPerPod": 2}},
        ),
    ),
    Refusal(
        "FlushlessWithNorm",
        "spec.training.maxGradientNorm",
        "`maxGradientNorm` waits for the gradients of all stages, which would drain the pipeline: remove it, or use"
        " 1F1B",
        piped({"maxGradientNorm": 1}, schedule="PipeDream2BW"),
    ),
    Refusal(
        "FlushlessWithMedian",
        "spec.training.skipSteps.aboveMedian",
        "`aboveMedian` waits for the gradients of all stages, which would drain the pipeline: use `lossDeviations`, or"
        " 1F1B",
        piped({"skipSteps": {"aboveMedian": 2}}, schedule="PipeDream"),
    ),
    Refusal(
        "FlushlessWithFp16",
        "spec.training.precision",
        "precision FP16 skips a step whose gradient overflows in any stage, and checking all stages would drain the"
        " pipeline: use BF16 or FP32, or 1F1B",
        piped({"precision": "FP16"}, schedule="PipeDream"),
    ),
    Refusal(
        "MicrobatchesFillStages",
        PIPELINE,
        "schedule 'PipeDream2BW' needs at least as many `microbatches` as stages: 1 are fewer than 2",
        piped(schedule="PipeDream2BW", microbatches=1),
    ),
    Refusal(
        "OneStagePerRank",
        PIPELINE,
        "schedule 'PipeDream' has 1 stage per rank, `stagesPerRank` is 2: remove it, or use Interleaved1F1B or"
        " LoopedBFS",
        piped(schedule="PipeDream", stagesPerRank=2),
    ),
    Refusal(
        "WorldSizeMultipleOfDegrees",
        "spec.parallelism",
        "world size 3 (3 pods x 1 processes) must be a multiple of the product of the degrees, which is 2: every"
        " stage and shard has the same number of replicas",
        merge(piped(schedule="PipeDream"), {"workers": {"replicas": 3}}),
    ),
)

PIPELINES_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "a pipeline": {"parallelism": {"pipelineParallelDegree": 2}},
    "GPipe with one microbatch": piped(schedule="GPipe", microbatches=1),
    "a pipeline of four stages on two ranks": piped(schedule="Interleaved1F1B", microbatches=6, split="Parameters"),
    "a pipeline like a V": piped(schedule="DualPipeV", microbatches=4),
    "PipeDream": piped(schedule="PipeDream", verticalSync=True),
    "PipeDream that accumulates": piped({"gradientAccumulationSteps": 2}, schedule="PipeDream", microbatches=1),
    "PipeDream's batch is a microbatch of each replica": merge(
        piped({"microBatchSize": 8, "globalBatchSize": 16, "gradientAccumulationSteps": 1}, schedule="PipeDream"),
        {"workers": {"replicas": 4}},
    ),
    "PipeDream-2BW": piped(schedule="PipeDream2BW", microbatches=4),
    "a pipeline whose layers are given": piped(layersPerStage=[15, 8]),
}
