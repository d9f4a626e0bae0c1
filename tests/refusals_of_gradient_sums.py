"""Jobs whose way of summing gradients does not go with something else, and some whose does."""

from collections.abc import Mapping
from typing import Any

from tests.builders import merge
from tests.refusal import Refusal

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
            f"`allReduce` and `compression` are hooks of DDP, which does not sum the gradients with `{cut}`: remove"
            " one of the two",
            spec,
        )
        for cut, spec in (
            ("dataParallelShardDegree", {**FOUR, "parallelism": {"dataParallelShardDegree": 2, **RING}}),
            ("tensorParallelDegree", {**FOUR, "parallelism": {"tensorParallelDegree": 2, **RING}}),
            ("pipelineParallelDegree", {**FOUR, "parallelism": {"pipelineParallelDegree": 2, **RING}}),
            (
                "offload.parameters",
                {**compressed("Int8"), "training": {"offload": {"parameters": True}}},
            ),
        )
    ),
    Refusal(
        "HookNeedsReplicas",
        DATA_PARALLEL,
        "`allReduce` and `compression` are about gradients of several replicas, and there is one: add workers,"
        " or remove them",
        {"workers": {"replicas": 1}, "parallelism": RING},
    ),
    *(
        Refusal(
            "SettingOfDdp",
            DATA_PARALLEL,
            f"`{setting}` is a setting of DDP, which does not sum the gradients by itself with `{other}`: remove one"
            " of the two",
            spec,
        )
        for setting, other, spec in (
            (
                "staticGraph",
                "dataParallelShardDegree",
                {**FOUR, "parallelism": {"dataParallelShardDegree": 2, **STATIC}},
            ),
            ("staticGraph", "tensorParallelDegree", {**FOUR, "parallelism": {"tensorParallelDegree": 2, **STATIC}}),
            ("staticGraph", "pipelineParallelDegree", {**FOUR, "parallelism": {"pipelineParallelDegree": 2, **STATIC}}),
            (
                "staticGraph",
                "offload.parameters",
                {"parallelism": STATIC, "training": {"offload": {"parameters": True}}},
            ),
            ("staticGraph", "mode", with_static(mode="LocalSGD")),
            ("staticGraph", "compression", with_static(compression={"name": "Int8"})),
            ("staticGraph", "allReduce", with_static(allReduce="Ring")),
            (
                "findUnusedParameters",
                "mode",
                {"parallelism": {"dataParallel": {"findUnusedParameters": True, "mode": "LocalSGD"}}},
            ),
        )
    ),
    *(
        Refusal(
            "SettingOfDdpNeedsReplicas",
            DATA_PARALLEL,
            f"`{setting}` is about gradients of several replicas, and there is one: add workers, or remove it",
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
        "`allReduce` Tree does not go with compression TopK, which cannot be summed on its way and has an exchange of"
        " its own: use Backend",
        {"parallelism": {"dataParallel": {"allReduce": "Tree", "compression": {"name": "TopK"}}}},
    ),
    Refusal(
        "Fp16WithKeptGradients",
        "spec.training.precision",
        "precision FP16 does not go with compression OneBit, which keeps a part for the next step, where the loss scale"
        " is another: use BF16 or FP32",
        {**compressed("OneBit"), "training": {"precision": "FP16"}},
    ),
    *(
        Refusal(
            "SkipStepsJudgesOneGradient",
            "spec.training.skipSteps",
            f"`skipSteps` does not go with {other}: ranks update by gradients of their own, keep parts of earlier ones,"
            " or skip overflows already; remove one of the two",
            merge(spec, {"training": {"skipSteps": {}}}),
        )
        for other, spec in (
            ("mode LocalSGD", {"parallelism": {"dataParallel": {"mode": "LocalSGD"}}}),
            (
                "schedule PipeDream",
                {
                    **FOUR,
                    "parallelism": {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream"}},
                },
            ),
            ("precision FP16", {"training": {"precision": "FP16"}}),
            ("compression OneBit", compressed("OneBit")),
        )
    ),
    Refusal(
        "MomentumCorrectionNeedsPlainSgd",
        f"{DATA_PARALLEL}.compression.momentumCorrection",
        "`momentumCorrection` is the momentum of SGD, applied before numbers are chosen: use the optimizer SGD without"
        " `momentum`",
        {
            **compressed("TopK", momentumCorrection=0.9),
            "training": {"optimizer": {"name": "SGD", "momentum": 0.9}},
        },
    ),
)

GRADIENT_SUMS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "a ring of 16-bit numbers": {
        "parallelism": {"dataParallel": {"allReduce": "Ring", "compression": {"name": "BF16"}}},
    },
    "momentum before the choice": {
        **compressed("TopK", ratio=0.01, warmupSteps=10, momentumCorrection=0.9),
        "training": {"optimizer": {"name": "SGD"}},
    },
    "8 bits with a loss scaler": {**compressed("Int8"), "training": {"precision": "FP16"}},
    "matrices of low rank": compressed("PowerSGD", rank=2, warmupSteps=10),
}
