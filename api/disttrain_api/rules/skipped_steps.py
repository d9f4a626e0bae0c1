"""What goes with steps that are skipped: all ranks judge one gradient before any of them makes an update of it."""

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.pipeline import FLUSHLESS_SCHEDULES, schedule_of
from disttrain_api.rules.flushless import FLUSHLESS
from disttrain_api.rules.gradient_sums import COMPRESSION_NAME, KEEP_THE_REST, list_of
from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import Precision


def _skipped_with_another(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.training.skip_steps is None:
        return None
    settings = spec.parallelism.data_parallel
    return when(
        settings.mode is not DataParallelMode.ALL_REDUCE
        or schedule_of(spec.parallelism) in FLUSHLESS_SCHEDULES
        or spec.training.precision is Precision.FP16
        or (settings.compression is not None and settings.compression.name in KEEP_THE_REST)
    )


SKIPPED_STEP_RULES = (
    Rule(
        id="SkipStepsJudgesOneGradient",
        path="spec.training.skipSteps",
        sentence="`skipSteps` needs `dataParallel.mode` AllReduce, and conflicts with PipeDream, PipeDream2BW, FP16,"
        " which skips overflows itself, and compression with error feedback",
        check=_skipped_with_another,
        cel="!self.?training.?skipSteps.hasValue() || (self.parallelism.dataParallel.mode == 'AllReduce'"
        f" && !({FLUSHLESS}) && self.training.precision != 'FP16'"
        f" && !({COMPRESSION_NAME} in {list_of(KEEP_THE_REST)}))",
        reads=(
            "spec.training.skipSteps",
            "spec.training.precision",
            "spec.parallelism.dataParallel",
            "spec.parallelism.pipeline",
            "spec.parallelism.pipelineParallelDegree",
        ),
    ),
)
