"""Refusals of checkpoint settings that need others."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

CHECKPOINT = "spec.training.checkpoint"


def saving(evaluation: int | None = None, **settings: Any) -> dict[str, Any]:
    """Changes of the checkpoints, and of the steps between two evaluations."""
    return {
        "storage": {"claimName": "a-claim"},
        "training": {"checkpoint": settings, "evaluation": {"interval": evaluation} if evaluation else {}},
    }


CHECKPOINT_REFUSALS = (
    Refusal(
        "KeepBestNeedsEvaluation",
        f"{CHECKPOINT}.keepBest",
        "`keepBest` needs an evaluation at each checkpoint: set `evaluation.interval`, or remove it",
        saving(keepBest=1),
    ),
    Refusal(
        "KeepBestNeedsMultiple",
        f"{CHECKPOINT}.keepBest",
        "`keepBest` needs an evaluation at each checkpoint: `checkpoint.interval` 10 must be a multiple of"
        " `evaluation.interval`, which is 4",
        saving(evaluation=4, interval=10, keepBest=1),
    ),
    Refusal(
        "BestMetricNeedsKeepBest",
        f"{CHECKPOINT}.bestMetric",
        "`bestMetric` has no effect without `keepBest`: set `keepBest`, or remove it",
        saving(evaluation=5, interval=10, bestMetric="Accuracy"),
    ),
    *(
        Refusal(
            "BestMetricNeedsMode",
            f"{CHECKPOINT}.bestMode",
            "`bestMode` and a `bestMetric` of your own need each other: set both",
            saving(evaluation=5, interval=10, keepBest=1, **settings),
        )
        for settings in ({"bestMetric": "f1"}, {"bestMode": "Max"})
    ),
)

CHECKPOINTS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "the best of the judged checkpoints": saving(evaluation=5, interval=10, keepBest=2, bestMetric="Loss"),
    "the best by a figure in lower case": saving(evaluation=5, interval=10, keepBest=2, bestMetric="accuracy"),
    "checkpoints in an object store": {"storage": {"url": "s3://bucket/a/prefix"}},
    "checkpoints that training waits for": saving(asynchronous=False),
}
