"""Pipelines that stay full from update to update (PipeDream, PipeDream2BW): what goes with them, and what does not."""

from collections.abc import Callable

from disttrain_api.compute import Precision
from disttrain_api.parallelism import DataParallelMode, PipelineSchedule
from disttrain_api.pipeline import FLUSHLESS_SCHEDULES, schedule_of
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import SkipSteps, Training

_PIPELINE = "spec.parallelism.pipeline"
_AT = "self.parallelism"
_NONE = "''"
_IS_PIPEDREAM = f"{given('self.?schedule', _NONE)} == 'PipeDream'"
# Without a degree above 1 another rule refuses `pipeline` as a whole.
FLUSHLESS = f"{given(f'{_AT}.?pipeline.?schedule', _NONE)} in {[str(name) for name in FLUSHLESS_SCHEDULES]}"
_CUTS = {
    "dataParallelShardDegree": "data_parallel_shard_degree",
    "tensorParallelDegree": "tensor_parallel_degree",
}
_OFFLOAD = "offload.parameters"
# The first setting that takes a stage's weights apart, or ''.
_CUT = " : ".join(
    [
        *(f"{given(f'{_AT}.?{alias}', '1')} > 1 ? '{alias}'" for alias in _CUTS),
        f"has(self.training) && self.training.{_OFFLOAD} ? '{_OFFLOAD}'",
        "''",
    ]
)


def _schedule(spec: JobSpec) -> str | None:
    """The schedule, where it is one of these."""
    schedule = schedule_of(spec.parallelism)
    return str(schedule) if schedule in FLUSHLESS_SCHEDULES else None


def _is_pipedream(spec: JobSpec) -> bool:
    return _schedule(spec) == PipelineSchedule.PIPE_DREAM


def _foreign_sync(spec: JobSpec) -> Values | None:
    pipeline = spec.parallelism.pipeline
    return when(pipeline is not None and pipeline.vertical_sync is not None and not _is_pipedream(spec))


def _several_microbatches(spec: JobSpec) -> Values | None:
    pipeline = spec.parallelism.pipeline
    found = (pipeline.microbatches if pipeline is not None else None) or 1
    return when(_is_pipedream(spec) and found > 1, found=found)


def _cut(spec: JobSpec) -> Values | None:
    schedule = _schedule(spec)
    found = [alias for alias, field in _CUTS.items() if (getattr(spec.parallelism, field) or 1) > 1]
    if spec.training is not None and spec.training.offload.parameters:
        found.append(_OFFLOAD)
    return {"schedule": schedule, "cut": found[0]} if schedule and found else None


def _with_servers(spec: JobSpec) -> Values | None:
    servers = spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER
    return when(servers and _schedule(spec) is not None)


def _trained(fits: Callable[[Training], bool]) -> Callable[[JobSpec], Values | None]:
    """Return the check that such a schedule meets a training that has what `fits` looks for."""
    return lambda spec: when(spec.training is not None and fits(spec.training) and _schedule(spec) is not None)


FLUSHLESS_RULES = (
    Rule(
        id="VerticalSyncNeedsPipeDream",
        path=_PIPELINE,
        scope=_PIPELINE,
        sentence="`verticalSync` is a setting of schedule PipeDream: remove it",
        check=_foreign_sync,
        cel=f"!has(self.verticalSync) || {_IS_PIPEDREAM}",
    ),
    Rule(
        id="PipeDreamHasNoBatches",
        path=_PIPELINE,
        scope=_PIPELINE,
        sentence="schedule 'PipeDream' updates after every microbatch, `microbatches` is {found}: remove it, or use"
        " PipeDream2BW",
        check=_several_microbatches,
        cel=f"!({_IS_PIPEDREAM}) || !has(self.microbatches) || self.microbatches == 1",
        values={"found": "self.microbatches"},
    ),
    Rule(
        id="FlushlessStagesAreWhole",
        path=_PIPELINE,
        sentence="schedule '{schedule}' keeps versions of a stage's whole weights, which `{cut}` splits: use"
        " replicas, or 1F1B",
        check=_cut,
        cel=f"!({FLUSHLESS}) || ({_CUT}) == ''",
        values={"schedule": f"{_AT}.pipeline.schedule", "cut": _CUT},
        reads=("spec.parallelism", f"spec.training.{_OFFLOAD}"),
    ),
    Rule(
        id="FlushlessWithServers",
        path=_PIPELINE,
        sentence="stages of PipeDream and PipeDream2BW update weights, which `mode` ParameterServer leaves to servers:"
        " use 1F1B",
        check=_with_servers,
        cel=f"!({FLUSHLESS}) || {_AT}.dataParallel.mode != 'ParameterServer'",
        reads=(_PIPELINE, "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="FlushlessWithNorm",
        path="spec.training.maxGradientNorm",
        sentence="`maxGradientNorm` waits for the gradients of all stages, which would drain the pipeline: remove it,"
        " or use 1F1B",
        check=_trained(lambda training: training.max_gradient_norm is not None),
        cel=f"!({FLUSHLESS}) || !self.?training.?maxGradientNorm.hasValue()",
        reads=("spec.training.maxGradientNorm", _PIPELINE),
    ),
    Rule(
        id="FlushlessWithMedian",
        path="spec.training.skipSteps.aboveMedian",
        sentence="`aboveMedian` waits for the gradients of all stages, which would drain the pipeline: use"
        " `lossDeviations`, or 1F1B",
        check=_trained(lambda training: (training.skip_steps or SkipSteps()).above_median is not None),
        cel=f"!({FLUSHLESS}) || !self.?training.?skipSteps.?aboveMedian.hasValue()",
        reads=("spec.training.skipSteps.aboveMedian", _PIPELINE),
    ),
    Rule(
        id="FlushlessWithFp16",
        path="spec.training.precision",
        sentence="precision FP16 skips a step whose gradient overflows in any stage, and checking all stages would"
        " drain the pipeline: use BF16 or FP32, or 1F1B",
        check=_trained(lambda training: training.precision is Precision.FP16),
        cel=f"!({FLUSHLESS}) || {given('self.?training.?precision', _NONE)} != 'FP16'",
        reads=("spec.training.precision", _PIPELINE),
    ),
)
