"""Jobs whose way of summing gradients conflicts with something else, and some whose does."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

DATA_PARALLEL = "spec.parallelism.dataParallel"


def compressed(name: str, **settings: Any) -> dict[str, Any]:
    """The part of a spec that compresses."""
    return {"parallelism": {"dataParallel": {"compression": {"name": name, **settings}}}}


def with_static(**settings: Any) -> dict[str, Any]:
    """The part of a spec that has a static graph and other settings of replicas."""
    return {"parallelism": {"dataParallel": {"staticGraph": True, **settings}}}


FOUR = {"workers": {"replicas": 4}}
STATIC = {"dataParallel": {"staticGraph": True}}
RING = {"dataParallel": {"allReduce": "Ring"}}

GRADIENT_SUM_REFUSALS = (
    *(
        Refusal(
            "SettingOfAnotherCompression",
            f"{DATA_PARALLEL}.compression",
            f"`{setting}` is not a setting of {name}: remove it or change `name`",
            {**compressed(name, **{setting: value}), "training": {"optimizer": {"name": "SGD"}}},
        )
        for setting, value, name in (
            ("rank", 2, "TopK"),
            ("ratio", 0.1, "Int8"),
            ("momentumCorrection", 0.9, "OneBit"),
            ("warmupSteps", 5, "FP16"),
        )
    ),
    *(
        Refusal(
            "HookNeedsDdp",
            DATA_PARALLEL,
            f"`allReduce` and `compression` are hooks of DDP, which does not reduce gradients with `{cut}`: remove"
            " one of the two",
            spec,
        )
        for cut, spec in (
            ("dataParallelShardDegree", {**FOUR, "parallelism": {"dataParallelShardDegree": 2, **RING}}),
            ("tensorParallelDegree", {**FOUR, "parallelism": {"tensorParallelDegree": 2, **RING}}),
            ("pipelineParallelDegree", {**FOUR, "parallelism": {"pipelineParallelDegree": 2, **RING}}),
            ("offload.parameters", {**compressed("Int8"), "training": {"offload": {"parameters": True}}}),
        )
    ),
    Refusal(
        "HookNeedsReplicas",
        DATA_PARALLEL,
        "`allReduce` and `compression` need several replicas, and there is one: add workers, or remove them",
        {"workers": {"replicas": 1}, "parallelism": RING},
    ),
    *(
        Refusal(
            "SettingOfDdp",
            DATA_PARALLEL,
            f"`{setting}` needs DDP's own all-reduce of gradients: remove it, or sharding, tensor and"
            " pipeline parallelism, `offload.parameters`, `compression`, and any `mode` and `allReduce` but the"
            " default",
            spec,
        )
        for setting, spec in (
            ("staticGraph", {**FOUR, "parallelism": {"dataParallelShardDegree": 2, **STATIC}}),
            ("staticGraph", {**FOUR, "parallelism": {"tensorParallelDegree": 2, **STATIC}}),
            ("staticGraph", {**FOUR, "parallelism": {"pipelineParallelDegree": 2, **STATIC}}),
            ("staticGraph", {"parallelism": STATIC, "training": {"offload": {"parameters": True}}}),
            ("staticGraph", with_static(mode="LocalSGD")),
            ("staticGraph", with_static(compression={"name": "Int8"})),
            ("staticGraph", with_static(allReduce="Ring")),
            (
                "findUnusedParameters",
                {"parallelism": {"dataParallel": {"findUnusedParameters": True, "mode": "LocalSGD"}}},
            ),
        )
    ),
    *(
        Refusal(
            "SettingOfDdpNeedsReplicas",
            DATA_PARALLEL,
            f"`{setting}` needs several replicas, and there is one: add workers, or remove it",
            {"workers": {"replicas": 1}, "parallelism": {"dataParallel": {setting: True}}},
        )
        for setting in ("staticGraph", "findUnusedParameters")
    ),
    Refusal(
        "StaticGraphUsesAll",
        DATA_PARALLEL,
        "`staticGraph` says that every step uses the same parameters, `findUnusedParameters` that they differ: remove"
        " one of the two",
        with_static(findUnusedParameters=True),
    ),
    Refusal(
        "CompressionHasOwnExchange",
        f"{DATA_PARALLEL}.allReduce",
        "`allReduce` Tree conflicts with compression TopK, which has an exchange of its own: use Backend",
        {"parallelism": {"dataParallel": {"allReduce": "Tree", "compression": {"name": "TopK"}}}},
    ),
    Refusal(
        "Fp16WithKeptGradients",
        "spec.training.precision",
        "precision FP16 conflicts with compression OneBit, which keeps an error for the next step, whose loss scale"
        " may differ: use BF16 or FP32",
        {**compressed("OneBit"), "training": {"precision": "FP16"}},
    ),
    *(
        Refusal(
            "RollBackNeedsRestarts",
            "spec.training.skipSteps",
            "`onMostInRow` RollBack needs `storage`, and another attempt: `restartPolicy` Gang and `maxRestarts` of at"
            " least 1",
            {"training": {"skipSteps": {"onMostInRow": "RollBack"}}, **spec},
        )
        for spec in (
            {},
            {"storage": {"claimName": "c"}, "runPolicy": {"restartPolicy": "Never"}},
            {"storage": {"claimName": "c"}, "runPolicy": {"maxRestarts": 0}},
        )
    ),
    Refusal(
        "MomentumCorrectionNeedsPlainSgd",
        f"{DATA_PARALLEL}.compression.momentumCorrection",
        "`momentumCorrection` replaces the momentum of SGD: use the optimizer SGD without `momentum`",
        {**compressed("TopK", momentumCorrection=0.9), "training": {"optimizer": {"name": "SGD", "momentum": 0.9}}},
    ),
)

GRADIENT_SUMS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "8 bits with a loss scaler": {**compressed("Int8"), "training": {"precision": "FP16"}},
    "matrices of low rank": compressed("PowerSGD", rank=2, warmupSteps=10),
}
