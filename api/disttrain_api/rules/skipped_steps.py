"""What goes with steps that are skipped: all ranks judge one gradient before any of them makes an update of it."""

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.pipeline import FLUSHLESS_SCHEDULES, schedule_of
from disttrain_api.rules.flushless import FLUSHLESS
from disttrain_api.rules.gradient_sums import COMPRESSION_NAME, KEEP_THE_REST, list_of
from disttrain_api.rules.rule import Rule, Values
from disttrain_api.spec import JobSpec
from disttrain_api.training import Precision

_MODE = "self.parallelism.dataParallel.mode"
# The first setting that it does not go with, or ''.
_OTHER = (
    f"({_MODE} != 'AllReduce' ? 'mode ' + {_MODE} : {FLUSHLESS} ? 'schedule ' + self.parallelism.pipeline.schedule"
    f" : self.training.precision == 'FP16' ? 'precision FP16' : {COMPRESSION_NAME} in {list_of(KEEP_THE_REST)}"
    f" ? 'compression ' + {COMPRESSION_NAME} : '')"
)


def _other(spec: JobSpec) -> str | None:
    parallelism, settings = spec.parallelism, spec.parallelism.data_parallel
    if settings.mode is not DataParallelMode.ALL_REDUCE:
        return f"mode {settings.mode}"
    if (schedule := schedule_of(parallelism)) in FLUSHLESS_SCHEDULES:
        return f"schedule {schedule}"
    if spec.training is not None and spec.training.precision is Precision.FP16:
        return "precision FP16"
    name = None if settings.compression is None else settings.compression.name
    return f"compression {name}" if name in KEEP_THE_REST else None


def _skipped_with(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.training.skip_steps is None or (other := _other(spec)) is None:
        return None
    return {"other": other}


SKIPPED_STEP_RULES = (
    Rule(
        id="SkipStepsJudgesOneGradient",
        path="spec.training.skipSteps",
        sentence="`skipSteps` does not go with {other}: ranks update by gradients of their own, keep parts of earlier"
        " ones, or skip overflows already; remove one of the two",
        check=_skipped_with,
        cel=f"!has(self.training) || !has(self.training.skipSteps) || {_OTHER} == ''",
        values={"other": _OTHER},
        reads=(
            "spec.training.skipSteps",
            "spec.training.precision",
            "spec.parallelism.dataParallel",
            "spec.parallelism.pipeline",
            "spec.parallelism.pipelineParallelDegree",
        ),
    ),
)
