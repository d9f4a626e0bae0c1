"""Jobs whose replicas meet less often, with what conflicts with that, and some that are accepted."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

DATA_PARALLEL = "spec.parallelism.dataParallel"
FOUR = {"workers": {"replicas": 4}}


def relaxed(mode: str, **settings: Any) -> dict[str, Any]:
    """The part of a spec that chooses the mode; `settings` lie beside it."""
    return {"parallelism": {"dataParallel": {"mode": mode, **settings}}}


def hierarchical(pods: int, processes: int, **periods: int) -> dict[str, Any]:
    """Pods of several processes, with these periods."""
    return {"workers": {"replicas": pods, "processesPerPod": processes}, **relaxed("LocalSGD", localSGD=periods)}


RELAXED_REFUSALS = (
    *(
        Refusal(
            "SettingsOfAnotherMode",
            DATA_PARALLEL,
            f"`{setting}` has the settings of another mode than {mode}: remove it or change `mode`",
            relaxed(mode, **{setting: {}}),
        )
        for setting, mode in (("localSGD", "AllReduce"), ("bmuf", "AllReduce"), ("bmuf", "LocalSGD"))
    ),
    *(
        Refusal(
            "RelaxedNeedsWholeReplicas",
            f"{DATA_PARALLEL}.mode",
            f"`mode` {mode} needs a whole model on each rank: use AllReduce with sharding, tensor or pipeline"
            " parallelism, and `offload.parameters`",
            {
                **FOUR,
                "parallelism": {"dataParallel": {"mode": mode}, **({} if "." in cut else {cut: 2})},
                **({"training": {"offload": {"parameters": True}}} if "." in cut else {}),
            },
        )
        for mode, cut in (
            ("LocalSGD", "dataParallelShardDegree"),
            ("BMUF", "tensorParallelDegree"),
            ("LocalSGD", "pipelineParallelDegree"),
            ("BMUF", "offload.parameters"),
        )
    ),
    Refusal(
        "RelaxedNeedsReplicas",
        f"{DATA_PARALLEL}.mode",
        "`mode` BMUF averages several replicas, and there is one: add workers, or use AllReduce",
        {"workers": {"replicas": 1}, **relaxed("BMUF")},
    ),
    *(
        Refusal(
            "RelaxedHasNoHooks",
            DATA_PARALLEL,
            "`allReduce` and `compression` apply to gradients, and `mode` LocalSGD averages parameters: remove them,"
            " or use AllReduce",
            relaxed("LocalSGD", **hook),
        )
        for hook in ({"allReduce": "Ring"}, {"compression": {"name": "Int8"}})
    ),
    Refusal(
        "Fp16WithRelaxed",
        "spec.training.precision",
        "precision FP16 conflicts with `mode` BMUF: each replica's loss scaler would skip different steps; use BF16 or"
        " FP32",
        {**relaxed("BMUF"), "training": {"precision": "FP16"}},
    ),
    *(
        Refusal(
            "GlobalPeriodIsLonger",
            f"{DATA_PARALLEL}.localSGD.globalPeriod",
            f"`globalPeriod` {found} must be a multiple of `period` 4 and greater",
            hierarchical(2, 2, period=4, globalPeriod=found),
        )
        for found in (4, 6)
    ),
    *(
        Refusal(
            "GlobalPeriodNeedsPods",
            f"{DATA_PARALLEL}.localSGD.globalPeriod",
            f"`globalPeriod` needs several pods of several processes, found {pods} x {processes}: remove it, or raise"
            " `replicas` or `processesPerPod`",
            hierarchical(pods, processes, period=4, globalPeriod=8),
        )
        for pods, processes in ((4, 1), (1, 4))
    ),
)

RELAXED_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "local SGD by its defaults": relaxed("LocalSGD"),
    "averages within pods": hierarchical(2, 2, period=4, globalPeriod=16),
    "BMUF": relaxed("BMUF", bmuf={"period": 4, "blockMomentum": 0.5, "nesterov": False, "optimizerState": "Average"}),
}
