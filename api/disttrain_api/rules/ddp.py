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


def _setting(spec: JobSpec) -> str | None:
    settings = spec.parallelism.data_parallel
    if settings.static_graph:
        return "staticGraph"
    return "findUnusedParameters" if settings.find_unused_parameters else None


def _without_ddp(spec: JobSpec) -> Values | None:
    setting, settings = _setting(spec), spec.parallelism.data_parallel
    alone = (
        cut_by(spec) is None
        and settings.mode is DataParallelMode.ALL_REDUCE
        and settings.compression is None
        and settings.all_reduce is AllReduce.BACKEND
    )
    return None if setting is None or alone else {"setting": setting}


def _without_replicas(spec: JobSpec) -> Values | None:
    setting, one = _setting(spec), spec.world_size == product_of_others(spec.parallelism)
    return {"setting": setting} if setting is not None and one else None


def _both(spec: JobSpec) -> Values | None:
    settings = spec.parallelism.data_parallel
    return when(settings.static_graph and settings.find_unused_parameters)


DDP_RULES = (
    Rule(
        id="SettingOfDdp",
        path=_PATH,
        sentence="`{setting}` needs DDP's own all-reduce of gradients: remove it, or sharding, tensor and"
        " pipeline parallelism, `offload.parameters`, `compression`, and any `mode` and `allReduce` but the default",
        check=_without_ddp,
        cel=f"!{_SET} || ({SHARD} == 1 && !{TENSOR_CUTS} && {PIPELINE} == 1 && !{OFFLOADS}"
        f" && {_CEL}.mode == 'AllReduce' && !has({_CEL}.compression) && {_CEL}.allReduce == 'Backend')",
        values={"setting": _SETTING},
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
        sentence="`{setting}` needs several replicas, and there is one: add workers, or remove it",
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
