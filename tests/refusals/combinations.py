"""Jobs whose techniques do not go together, and some whose do."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

PARALLELISM = "spec.parallelism"
CUTS = (
    ("Shards", "dataParallelShardDegree"),
    ("Tensor", "tensorParallelDegree"),
    ("Pipeline", "pipelineParallelDegree"),
)
GPT_ON_TEXT = {"training": {"model": {"name": "gpt"}, "data": {"name": "text"}}}
COMPILED = {"training": {"model": {"name": "gpt"}, "data": {"name": "text"}, "compile": True}}
OVERLAPPED = {"tensorParallelDegree": 2, "sequenceParallel": True, "asyncTensorParallel": True}
TWO_IN_A_POD = {"workers": {"replicas": 1, "processesPerPod": 2}}

COMBINATION_REFUSALS = (
    Refusal(
        "Float8NeedsBF16",
        "spec.training.float8",
        "`float8` needs `precision` BF16, found FP32: what is not multiplied in FP8 is BF16",
        {"training": {"float8": "Rowwise"}},
    ),
    Refusal(
        "TensorNeedsPlan",
        f"{PARALLELISM}.tensorParallelDegree",
        "the model 'resnet' has no tensor plan: `tensorParallelDegree` must be 1, found 2; use"
        " `dataParallelShardDegree`",
        {"training": {"model": {"name": "resnet"}}, "parallelism": {"tensorParallelDegree": 2}},
    ),
    Refusal(
        "ExpertsNeedExperts",
        f"{PARALLELISM}.expertParallelDegree",
        "the model 'mlp' has no experts: `expertParallelDegree` must be 1, found 2; use `dataParallelShardDegree`",
        {"parallelism": {"expertParallelDegree": 2, "dataParallelShardDegree": 2}},
    ),
    *(
        Refusal(
            f"{field[0].upper()}{field[1:]}NeedsTensor",
            f"{PARALLELISM}.{field}",
            f"`{field}` needs `tensorParallelDegree` greater than 1: it shards within the tensor group",
            {"parallelism": {field: True}, **GPT_ON_TEXT},
        )
        for field in ("sequenceParallel", "vocabularyParallel")
    ),
    *(
        Refusal(
            f"{field[0].upper()}{field[1:]}NeedsTokens",
            f"{PARALLELISM}.{field}",
            f"`{field}` needs a model of tokens, which 'mlp' is not: remove it, or use another model",
            {"parallelism": {field: True, "tensorParallelDegree": 2}},
        )
        for field in ("sequenceParallel", "vocabularyParallel")
    ),
    Refusal(
        "AsyncTensorParallelNeedsSequence",
        f"{PARALLELISM}.asyncTensorParallel",
        "`asyncTensorParallel` needs `sequenceParallel`: it overlaps what is gathered and scattered along the sequence",
        {"parallelism": {"tensorParallelDegree": 2, "asyncTensorParallel": True}, **TWO_IN_A_POD, **COMPILED},
    ),
    Refusal(
        "AsyncTensorParallelNeedsCompile",
        f"{PARALLELISM}.asyncTensorParallel",
        "`asyncTensorParallel` needs `training.compile`: the compiler finds what can overlap",
        {"parallelism": OVERLAPPED, **TWO_IN_A_POD, **GPT_ON_TEXT},
    ),
    Refusal(
        "AsyncTensorParallelWithinPods",
        f"{PARALLELISM}.asyncTensorParallel",
        "`asyncTensorParallel` needs tensor groups within a pod, whose GPUs reach each other's memory:"
        " `tensorParallelDegree` 2 must divide the processes per pod, which are 1",
        {"parallelism": OVERLAPPED, **COMPILED},
    ),
    Refusal(
        "VocabularyParallelNeedsCrossEntropy",
        f"{PARALLELISM}.vocabularyParallel",
        "`vocabularyParallel` shards the logits, and the loss MeanSquaredError needs all of them: use CrossEntropy,"
        " or remove it",
        {
            "parallelism": {"tensorParallelDegree": 2, "vocabularyParallel": True},
            "training": {**GPT_ON_TEXT["training"], "loss": {"name": "MeanSquaredError"}},
        },
    ),
    *(
        Refusal(
            f"DevicesWith{what}",
            f"{PARALLELISM}.devicesPerProcess",
            f"`devicesPerProcess` 2 conflicts with `{degree}` 2, which needs a process per device: remove one of the"
            " two",
            {"parallelism": {"devicesPerProcess": 2, degree: 2}},
        )
        for what, degree in CUTS
    ),
    Refusal(
        "DeviceModeNeedsDevices",
        f"{PARALLELISM}.deviceMode",
        "`deviceMode` needs `devicesPerProcess` greater than 1: set it, or remove `deviceMode`",
        {"parallelism": {"deviceMode": "Place"}},
    ),
    Refusal(
        "DevicesWithOffload",
        f"{PARALLELISM}.devicesPerProcess",
        "`devicesPerProcess` 2 conflicts with `offload.parameters`, which needs a process per device: remove one of"
        " the two",
        {"training": {"offload": {"parameters": True}}, "parallelism": {"devicesPerProcess": 2}},
    ),
    Refusal(
        "GpusAreDevices",
        "spec.workers.gpusPerPod",
        "`gpusPerPod` 4 must equal processes per pod x `devicesPerProcess`, which is 1 x 2",
        {"workers": {"gpusPerPod": 4, "processesPerPod": 1}, "parallelism": {"devicesPerProcess": 2}},
    ),
)

COMBINATIONS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "a sharded job": {"parallelism": {"dataParallelShardDegree": 2}},
    "a process with two GPUs": {
        "workers": {"gpusPerPod": 2, "processesPerPod": 1},
        "parallelism": {"devicesPerProcess": 2, "deviceMode": "Place"},
    },
    "a model that lies elsewhere": {"training": {"offload": {"parameters": True, "activations": True}}},
}
