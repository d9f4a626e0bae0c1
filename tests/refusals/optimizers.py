"""Jobs whose optimizer cannot be as it is asked for, and some that can."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

OPTIMIZER = "spec.training.optimizer"


def optimizer(**settings: Any) -> dict[str, Any]:
    """Changes of the optimizer."""
    return {"training": {"optimizer": settings}}


OPTIMIZER_REFUSALS = (
    *(
        Refusal(
            "SettingNeedsOptimizer",
            OPTIMIZER,
            f"`{setting}` is not a setting of {name}: remove it or change `name`",
            optimizer(name=name, **{setting: value}),
        )
        for setting, value, name in (
            ("momentum", 0.9, "Adam"),
            ("nesterov", False, "AdamW"),
            ("beta1", 0.9, "SGD"),
            ("beta2", 0.99, "Adafactor"),
            ("epsilon", 1e-6, "SGD"),
            ("beta2Decay", -0.5, "Muon"),
            ("d", 2, "AdamW"),
            ("nsSteps", 4, "Adafactor"),
            ("adjustLrFn", "Original", "SGD"),
        )
    ),
    *(
        Refusal(
            "WholeMatrices",
            f"{OPTIMIZER}.name",
            f"the optimizer {name} needs whole matrices on the device, and `{setting}` prevents that: remove one of"
            " the two",
            {"parallelism": parallelism, "training": {"optimizer": {"name": name}, **changes}},
        )
        for name, setting, parallelism, changes in (
            ("Adafactor", "dataParallelShardDegree", {"dataParallelShardDegree": 2}, {}),
            ("Adafactor", "tensorParallelDegree", {"tensorParallelDegree": 2}, {}),
            ("Adafactor", "offload.parameters", {}, {"offload": {"parameters": True}}),
            ("Muon", "offload.parameters", {}, {"offload": {"parameters": True}}),
        )
    ),
    Refusal(
        "NesterovNeedsMomentum",
        f"{OPTIMIZER}.nesterov",
        "`nesterov` needs `momentum` greater than 0",
        optimizer(name="SGD", nesterov=True, momentum=0),
    ),
)

OPTIMIZERS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "nesterov": {"training": {"optimizer": {"name": "SGD", "momentum": 0.9, "nesterov": True}}},
    "betas of Adam": {"training": {"optimizer": {"name": "Adam", "beta1": 0.8, "epsilon": 1e-6}}},
    "Muon's own momentum": optimizer(name="Muon", nesterov=True),
    "settings of Adafactor": optimizer(name="Adafactor", beta2Decay=-0.5, d=2),
}
