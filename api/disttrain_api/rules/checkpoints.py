"""Settings of checkpoints that need others."""

from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import KNOWN_MODES

_OWN_FIGURES = [name for one in KNOWN_MODES for name in (one, one.lower())]
_BEST = "self.?checkpoint.?keepBest.hasValue()"


def _intervals(spec: JobSpec) -> tuple[int, int | None] | None:
    """Steps between two checkpoints and between two evaluations, where the best checkpoints are kept."""
    training = spec.training
    if training is None or training.checkpoint is None or training.checkpoint.keep_best is None:
        return None
    return training.checkpoint.interval, training.evaluation.interval


def _not_judged(spec: JobSpec) -> Values | None:
    intervals = _intervals(spec)
    return when(intervals is not None and intervals[1] is None)


def _judged_elsewhere(spec: JobSpec) -> Values | None:
    interval, evaluation = _intervals(spec) or (0, None)
    return when(evaluation is not None and interval % evaluation != 0, interval=interval, evaluation=evaluation or 0)


def _unknown_mode(spec: JobSpec) -> Values | None:
    settings = spec.training.checkpoint if spec.training is not None else None
    if settings is None:
        return None
    if settings.best_mode is not None:
        return when(settings.best_metric is None)
    return when(settings.best_metric is not None and settings.best_metric not in _OWN_FIGURES)


CHECKPOINT_RULES = (
    Rule(
        id="KeepBestNeedsEvaluation",
        path="spec.training.checkpoint.keepBest",
        scope="spec.training",
        sentence="`keepBest` needs an evaluation at each checkpoint: set `evaluation.interval`, or remove it",
        check=_not_judged,
        cel=f"!{_BEST} || has(self.evaluation.interval)",
        reads=("spec.training.checkpoint.keepBest", "spec.training.evaluation.interval"),
    ),
    Rule(
        id="KeepBestNeedsMultiple",
        path="spec.training.checkpoint.keepBest",
        scope="spec.training",
        sentence="`keepBest` needs an evaluation at each checkpoint: `checkpoint.interval` {interval} must be a"
        " multiple of `evaluation.interval`, which is {evaluation}",
        check=_judged_elsewhere,
        cel=f"!{_BEST} || !has(self.evaluation.interval) || self.checkpoint.interval % self.evaluation.interval == 0",
        values={"interval": "self.checkpoint.interval", "evaluation": "self.evaluation.interval"},
        reads=(
            "spec.training.checkpoint.keepBest",
            "spec.training.checkpoint.interval",
            "spec.training.evaluation.interval",
        ),
    ),
    Rule(
        id="BestMetricNeedsKeepBest",
        path="spec.training.checkpoint.bestMetric",
        scope="spec.training.checkpoint",
        sentence="`bestMetric` has no effect without `keepBest`: set `keepBest`, or remove it",
        check=lambda spec: when(
            spec.training is not None
            and spec.training.checkpoint is not None
            and spec.training.checkpoint.best_metric is not None
            and spec.training.checkpoint.keep_best is None
        ),
        cel="!has(self.bestMetric) || has(self.keepBest)",
        reads=("spec.training.checkpoint.bestMetric", "spec.training.checkpoint.keepBest"),
    ),
    Rule(
        id="BestMetricNeedsMode",
        path="spec.training.checkpoint.bestMode",
        scope="spec.training.checkpoint",
        sentence="`bestMode` and a `bestMetric` of your own need each other: set both",
        check=_unknown_mode,
        cel=f"has(self.bestMode) ? has(self.bestMetric) : !has(self.bestMetric) || self.bestMetric in {_OWN_FIGURES}",
        reads=("spec.training.checkpoint.bestMetric", "spec.training.checkpoint.bestMode"),
    ),
)
