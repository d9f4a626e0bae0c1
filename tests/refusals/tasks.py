"""Jobs with a task of the user's that are refused, and some that are not."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

TASK = {"task": {"entrypoint": "mine:Task"}, "model": None, "data": None}
_LAYOUT = (
    "`task` conflicts with `pipelineParallelDegree`, `devicesPerProcess`, `sequenceParallel`, `vocabularyParallel`"
    " and parameter servers, which need batches of an input and a target: use replicas, sharding or tensor groups"
)
_AGAINST: tuple[Mapping[str, Any], ...] = (
    {"parallelism": {"pipelineParallelDegree": 2}},
    {"parallelism": {"devicesPerProcess": 2}},
    {"parallelism": {"tensorParallelDegree": 2, "sequenceParallel": True}},
    {"parallelism": {"tensorParallelDegree": 2, "vocabularyParallel": True}},
    {"parallelism": {"dataParallel": {"mode": "ParameterServer"}}, "parameterServers": {"replicas": 1}},
)

TASK_REFUSALS = (
    *(Refusal("TaskWithLayout", "spec.training.task", _LAYOUT, {**spec, "training": TASK}) for spec in _AGAINST),
    Refusal(
        "TaskWithLoss",
        "spec.training.loss",
        "`task` has a loss of its own: remove `loss`",
        {"training": {**TASK, "loss": {"name": "MeanSquaredError"}}},
    ),
)

CALLBACKS = {"callbacks": [{"entrypoint": "mine:Log", "config": {"every": 10}}]}
_SERVERS = {"parallelism": {"dataParallel": {"mode": "ParameterServer"}}, "parameterServers": {"replicas": 1}}
_PIPEDREAM = {"parallelism": {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream2BW"}}}

_OWN = {"entrypoint": "mine:Make"}
_ALONE = (
    *(
        ("Optimizer", "optimizer", setting)
        for setting in ({"name": "SGD"}, {"beta1": 0.5}, {"beta2": 0.5}, {"epsilon": 1})
    ),
    *(("LrSchedule", "lrSchedule", setting) for setting in ({"name": "Linear"}, {"warmupSteps": 1})),
)
ENTRYPOINT_REFUSALS = (
    *(
        Refusal(
            f"{rule}EntrypointAlone",
            f"spec.training.{part}.entrypoint",
            "`entrypoint` replaces `name` and its settings: remove these",
            {"training": {part: {**_OWN, **setting}}},
        )
        for rule, part, setting in _ALONE
    ),
    *(
        Refusal(
            "EntrypointOnServers",
            "spec.training",
            "an `entrypoint` of `optimizer` or `lrSchedule` conflicts with `mode` ParameterServer, where servers"
            " update the parameters: remove it, or use AllReduce",
            {
                "parallelism": {"dataParallel": {"mode": "ParameterServer"}},
                "parameterServers": {"replicas": 1},
                "training": {part: _OWN},
            },
        )
        for part in ("optimizer", "lrSchedule")
    ),
)

BETWEEN_STEPS_REFUSALS = tuple(
    Refusal(
        "CallbacksWithLayout",
        "spec.training.callbacks",
        "`callbacks` are called between two steps of all ranks, which parameter servers, PipeDream and"
        " PipeDream2BW do not have: remove them",
        {**layout, "training": CALLBACKS},
    )
    for layout in (_SERVERS, _PIPEDREAM)
)

TASKS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "a task in place of model and data": {"training": TASK},
    "callbacks in a pipeline with a flush": {"training": CALLBACKS, "parallelism": {"pipelineParallelDegree": 2}},
    "a task on tensor groups": {"training": TASK, "parallelism": {"tensorParallelDegree": 2}},
}
