"""Jobs with context parallelism and something that does not go with it."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

_PATH = "spec.parallelism.contextParallelDegree"
_LLAMA = {"name": "transformers", "config": {"config": {"model_type": "llama"}}}
_GPT = {"model": {"name": "gpt"}, "data": {"name": "text"}}
_UNTIED = {**_GPT, "model": {"name": "gpt", "config": {"tieWeights": False}}}
_CONTEXT = {"contextParallelDegree": 2}
_FOUR = {"workers": {"replicas": 4}}


def _layout(setting: str, parallelism: Mapping[str, Any], **spec: Any) -> Refusal:
    return Refusal(
        "ContextWithLayout",
        _PATH,
        f"`contextParallelDegree` 2 conflicts with `{setting}`: use replicas, shards, tensor and expert groups and"
        " pipelines that are flushed beside it, or remove one of the two",
        {"training": _GPT, **_FOUR, "parallelism": {**_CONTEXT, **parallelism}, **spec},
    )


def _training(setting: str, training: Mapping[str, Any]) -> Refusal:
    return Refusal(
        "ContextWithTraining",
        _PATH,
        f"`contextParallelDegree` 2 conflicts with `training.{setting}`: it needs batches of tokens and CrossEntropy;"
        " remove one of the two",
        {"training": training, "parallelism": _CONTEXT},
    )


CONTEXT_REFUSALS = (
    Refusal(
        "ContextMethodNeedsDegree",
        "spec.parallelism.contextParallelMethod",
        "`contextParallelMethod` needs `contextParallelDegree` greater than 1",
        {"training": _GPT, "parallelism": {"contextParallelDegree": 1, "contextParallelMethod": "Ring"}},
    ),
    *(
        Refusal(
            "RingAttention",
            "spec.training.attention",
            f"`contextParallelMethod` Ring has no kernel {kernel}: use Flash or Math, or Ulysses",
            {"training": {**_GPT, "attention": kernel}, "parallelism": {**_CONTEXT, "contextParallelMethod": "Ring"}},
        )
        for kernel in ("CuDNN", "Efficient")
    ),
    _layout("devicesPerProcess", {"devicesPerProcess": 2}),
    *(
        _layout(f"pipeline.{field}", {"pipelineParallelDegree": 2, "pipeline": {field: value}}, training=_UNTIED)
        for field, value in (("schedule", "PipeDream"), ("schedule", "PipeDream2BW"), ("split", "Time"))
    ),
    _layout("dataParallel.mode", {"dataParallel": {"mode": "LocalSGD"}}),
    _layout("dataParallel.allReduce", {"dataParallel": {"allReduce": "Ring"}}),
    _layout("dataParallel.compression", {"dataParallel": {"compression": {"name": "FP16"}}}),
    _layout(
        "dataParallel.syncBatchNorm",
        {"dataParallel": {"syncBatchNorm": True}},
        training={**_GPT, "model": {"name": None, "entrypoint": "mine:model"}},
    ),
    *(
        Refusal(
            "ContextNeedsModel",
            _PATH,
            f"the model '{model}' does not compute parts of sequences: `contextParallelDegree` must be 1, found 2; use"
            " the model gpt or transformers, or `dataParallelShardDegree`",
            {"training": training, "parallelism": _CONTEXT},
        )
        for model, training in (
            ("mlp", {}),
            ("resnet", {"model": {"name": "resnet"}}),
        )
    ),
    _training("task", {"model": None, "data": None, "task": {"entrypoint": "mine:task"}}),
    _training("loss.name", {**_GPT, "loss": {"name": "MeanSquaredError"}}),
)

CONTEXT_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "parts of sequences": {"training": _GPT, "parallelism": _CONTEXT},
    "parts of sequences on a ring": {"training": _GPT, "parallelism": {**_CONTEXT, "contextParallelMethod": "Ring"}},
    "parts of sequences of compiled layers": {"training": {**_GPT, "compile": True}, "parallelism": _CONTEXT},
    "parts of sequences in a pipeline": {
        "training": _GPT,
        **_FOUR,
        "parallelism": {**_CONTEXT, "pipelineParallelDegree": 2, "pipeline": {"schedule": "ZBVZeroBubble"}},
    },
    "parts of sequences on shards": {
        "training": {**_GPT, "activationCheckpointing": "Selective"},
        **_FOUR,
        "parallelism": {**_CONTEXT, "dataParallelShardDegree": 2},
    },
    "parts of sequences on tensor groups": {
        "training": _GPT,
        **_FOUR,
        "parallelism": {**_CONTEXT, "tensorParallelDegree": 2, "sequenceParallel": True, "vocabularyParallel": True},
    },
    "parts of sequences and experts that the same ranks hold": {
        "training": {**_GPT, "model": {"name": "gpt", "config": {"experts": 4}}},
        **_FOUR,
        "parallelism": {**_CONTEXT, "tensorParallelDegree": 2, "expertParallelDegree": 4},
    },
    "parts of sequences on a ring without score matrices": {
        "training": {**_GPT, "attention": "Flash"},
        "parallelism": {**_CONTEXT, "contextParallelMethod": "Ring"},
    },
    "parts of sequences of a llama": {"training": {**_GPT, "model": _LLAMA}, "parallelism": _CONTEXT},
    "parts of a model of one's own": {
        "training": {**_GPT, "model": {"name": None, "entrypoint": "mine:model"}},
        **_FOUR,
        "parallelism": {**_CONTEXT, "dataParallel": {"findUnusedParameters": True}},
    },
    "groups of one rank": {
        "training": {"compile": True},
        "parallelism": {"contextParallelDegree": 1, "dataParallel": {"mode": "BMUF"}},
    },
}
