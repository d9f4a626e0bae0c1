"""Replicas that train alone and average their parameters now and then: which settings and techniques go with that."""

from disttrain_api.compute import Precision
from disttrain_api.parallelism import DataParallel, DataParallelMode
from disttrain_api.rules.gradient_sums import OFFLOADS, TENSOR_CUTS, cut_by, has_hook
from disttrain_api.rules.layout import PIPELINE, PODS, PROCESSES, READS_LAYOUT, SHARD, WORLD
from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec

_DATA_PARALLEL = "spec.parallelism.dataParallel"
_GLOBAL_PERIOD = f"{_DATA_PARALLEL}.localSGD.globalPeriod"
_MODE = f"{_DATA_PARALLEL}.mode"
_CEL = "self.parallelism.dataParallel"
_MODES = "['LocalSGD', 'BMUF']"
_RELAXED = f"({_CEL}.mode in {_MODES})"
_HAS_GLOBAL = f"{_CEL}.?localSGD.?globalPeriod.hasValue()"
# The first settings that belong to another mode, or ''.
_FOREIGN = (
    "has(self.localSGD) && self.mode != 'LocalSGD' ? 'localSGD' : has(self.bmuf) && self.mode != 'BMUF' ? 'bmuf' : ''"
)


def _data_parallel(spec: JobSpec) -> DataParallel:
    return spec.parallelism.data_parallel


def _mode(spec: JobSpec) -> DataParallelMode | None:
    """The mode, where it is a relaxed one."""
    settings = _data_parallel(spec)
    return None if settings.relaxed is None else settings.mode


def _foreign_settings(spec: JobSpec) -> Values | None:
    settings = _data_parallel(spec)
    for alias, given, mode in (
        ("localSGD", settings.local_sgd, DataParallelMode.LOCAL_SGD),
        ("bmuf", settings.bmuf, DataParallelMode.BMUF),
    ):
        if given is not None and settings.mode is not mode:
            return {"setting": alias, "mode": settings.mode.value}
    return None


def _global_period(spec: JobSpec) -> int | None:
    settings = _data_parallel(spec).local_sgd
    return None if settings is None else settings.global_period


def _uneven_periods(spec: JobSpec) -> Values | None:
    settings, found = _data_parallel(spec).local_sgd, _global_period(spec)
    if settings is None or found is None:
        return None
    return when(found <= settings.period or found % settings.period != 0, found=found, period=settings.period)


def _needs_pods_of_several(spec: JobSpec) -> Values | None:
    workers = spec.workers
    return when(
        _global_period(spec) is not None and (workers.replicas == 1 or workers.ranks_per_pod == 1),
        pods=workers.replicas,
        processes=workers.ranks_per_pod,
    )


def _relaxed_when(spec: JobSpec, wrong: bool) -> Values | None:
    mode = _mode(spec)
    return None if mode is None else when(wrong, mode=mode.value)


RELAXED_RULES = (
    Rule(
        id="SettingsOfAnotherMode",
        path=_DATA_PARALLEL,
        scope=_DATA_PARALLEL,
        sentence="`{setting}` has the settings of another mode than {mode}: remove it or change `mode`",
        check=_foreign_settings,
        cel=f"({_FOREIGN}) == ''",
        values={"setting": _FOREIGN, "mode": "self.mode"},
    ),
    Rule(
        id="RelaxedNeedsWholeReplicas",
        path=_MODE,
        sentence="`mode` {mode} needs a whole model on each rank: use AllReduce with sharding, tensor or pipeline"
        " parallelism, and `offload.parameters`",
        check=lambda spec: _relaxed_when(spec, cut_by(spec) is not None),
        cel=f"!{_RELAXED} || ({SHARD} == 1 && !{TENSOR_CUTS} && {PIPELINE} == 1 && !{OFFLOADS})",
        values={"mode": f"{_CEL}.mode"},
        reads=(
            _MODE,
            "spec.parallelism.dataParallelShardDegree",
            "spec.parallelism.tensorParallelDegree",
            "spec.parallelism.pipelineParallelDegree",
            "spec.training.offload.parameters",
        ),
    ),
    Rule(
        id="RelaxedNeedsReplicas",
        path=_MODE,
        sentence="`mode` {mode} averages several replicas, and there is one: add workers, or use AllReduce",
        check=lambda spec: _relaxed_when(spec, spec.world_size == 1),
        cel=f"!{_RELAXED} || {WORLD} > 1",
        values={"mode": f"{_CEL}.mode"},
        reads=(_MODE, *READS_LAYOUT),
    ),
    Rule(
        id="RelaxedHasNoHooks",
        path=_DATA_PARALLEL,
        scope=_DATA_PARALLEL,
        sentence="`allReduce` and `compression` apply to gradients, and `mode` {mode} averages parameters: remove"
        " them, or use AllReduce",
        check=lambda spec: _relaxed_when(spec, has_hook(spec)),
        cel=f"!(self.mode in {_MODES}) || (!has(self.compression) && self.allReduce == 'Backend')",
        values={"mode": "self.mode"},
    ),
    Rule(
        id="Fp16WithRelaxed",
        path="spec.training.precision",
        sentence="precision FP16 conflicts with `mode` {mode}: each replica's loss scaler would skip different steps;"
        " use"
        " BF16 or FP32",
        check=lambda spec: _relaxed_when(spec, spec.training is not None and spec.training.precision is Precision.FP16),
        cel=f"!{_RELAXED} || !has(self.training) || self.training.precision != 'FP16'",
        values={"mode": f"{_CEL}.mode"},
        reads=("spec.training.precision", _MODE),
    ),
    Rule(
        id="GlobalPeriodIsLonger",
        path=_GLOBAL_PERIOD,
        scope=f"{_DATA_PARALLEL}.localSGD",
        sentence="`globalPeriod` {found} must be a multiple of `period` {period} and greater",
        check=_uneven_periods,
        cel="!has(self.globalPeriod) || (self.globalPeriod > self.period && self.globalPeriod % self.period == 0)",
        values={"found": "self.globalPeriod", "period": "self.period"},
        reads=(f"{_DATA_PARALLEL}.localSGD",),
    ),
    Rule(
        id="GlobalPeriodNeedsPods",
        path=_GLOBAL_PERIOD,
        sentence="`globalPeriod` needs several pods of several processes, found {pods} x {processes}: remove it, or"
        " raise `replicas` or `processesPerPod`",
        check=_needs_pods_of_several,
        cel=f"!{_HAS_GLOBAL} || ({PODS} > 1 && {PROCESSES} > 1)",
        values={"pods": PODS, "processes": PROCESSES},
        reads=(_GLOBAL_PERIOD, "spec.workers.replicas", "spec.workers.processesPerPod", "spec.workers.gpusPerPod"),
    ),
)
