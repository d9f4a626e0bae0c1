"""What goes with the settings of DDP that say which parameters a step uses."""

from disttrain_api.parallelism import AllReduce, DataParallelMode
from disttrain_api.rules.gradient_sums import OFFLOADS, TENSOR_CUTS, cut_by
from disttrain_api.rules.layout import OTHERS, PIPELINE, READS_LAYOUT, SHARD, WORLD, product_of_others
from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec

_PATH = "spec.parallelism.dataParallel"
_CEL = "self.parallelism.dataParallel"
_SET = f"({_CEL}.staticGraph || {_CEL}.findUnusedParameters)"
_SETTING = f"({_CEL}.staticGraph ? 'staticGraph' : 'findUnusedParameters')"
# The first setting with which DDP does not sum the gradients, or not by itself; or ''.
_OTHER = (
    f"({SHARD} > 1 ? 'dataParallelShardDegree' : {TENSOR_CUTS} ? 'tensorParallelDegree'"
    f" : {PIPELINE} > 1 ? 'pipelineParallelDegree' : {OFFLOADS} ? 'offload.parameters'"
    f" : {_CEL}.mode != 'AllReduce' ? 'mode' : has({_CEL}.compression) ? 'compression'"
    f" : {_CEL}.allReduce != 'Backend' ? 'allReduce' : '')"
)


def _other(spec: JobSpec) -> str | None:
    settings = spec.parallelism.data_parallel
    if (cut := cut_by(spec)) is not None:
        return cut
    if settings.mode is not DataParallelMode.ALL_REDUCE:
        return "mode"
    if settings.compression is not None:
        return "compression"
    return "allReduce" if settings.all_reduce is not AllReduce.BACKEND else None


def _setting(spec: JobSpec) -> str | None:
    settings = spec.parallelism.data_parallel
    if settings.static_graph:
        return "staticGraph"
    return "findUnusedParameters" if settings.find_unused_parameters else None


def _with_another(spec: JobSpec) -> Values | None:
    setting, other = _setting(spec), _other(spec)
    return {"setting": setting, "other": other} if setting is not None and other is not None else None


def _without_replicas(spec: JobSpec) -> Values | None:
    setting, alone = _setting(spec), spec.world_size == product_of_others(spec.parallelism)
    return {"setting": setting} if setting is not None and alone else None


def _both(spec: JobSpec) -> Values | None:
    settings = spec.parallelism.data_parallel
    return when(settings.static_graph and settings.find_unused_parameters)


DDP_RULES = (
    Rule(
        id="SettingOfDdp",
        path=_PATH,
        sentence="`{setting}` is a setting of DDP, which does not sum the gradients by itself with `{other}`: remove"
        " one of the two",
        check=_with_another,
        cel=f"!{_SET} || {_OTHER} == ''",
        values={"setting": _SETTING, "other": _OTHER},
        reads=(
            "spec.parallelism.dataParallel",
            "spec.parallelism.dataParallelShardDegree",
            "spec.parallelism.tensorParallelDegree",
            "spec.parallelism.pipelineParallelDegree",
            "spec.training.offload.parameters",
        ),
    ),
    Rule(
        id="SettingOfDdpNeedsReplicas",
        path=_PATH,
        sentence="`{setting}` is about gradients of several replicas, and there is one: add workers, or remove it",
        check=_without_replicas,
        cel=f"!{_SET} || {WORLD} != {OTHERS}",
        values={"setting": _SETTING},
        reads=(_PATH, *READS_LAYOUT),
    ),
    Rule(
        id="StaticGraphUsesAll",
        path=_PATH,
        sentence="`staticGraph` says that every step uses the same parameters, `findUnusedParameters` that they differ:"
        " remove one of the two",
        check=_both,
        cel=f"!{_CEL}.staticGraph || !{_CEL}.findUnusedParameters",
    ),
)
