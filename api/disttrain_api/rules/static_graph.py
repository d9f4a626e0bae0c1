"""What goes with DDP's static graph."""

from disttrain_api.parallelism import AllReduce, DataParallelMode
from disttrain_api.rules.gradient_sums import OFFLOADS, TENSOR_CUTS, cut_by
from disttrain_api.rules.layout import OTHERS, PIPELINE, READS_LAYOUT, SHARD, WORLD, product_of_others
from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec

_PATH = "spec.parallelism.dataParallel.staticGraph"
_CEL = "self.parallelism.dataParallel"
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


def _with_another(spec: JobSpec) -> Values | None:
    other = _other(spec)
    return {"other": other} if spec.parallelism.data_parallel.static_graph and other is not None else None


def _without_replicas(spec: JobSpec) -> Values | None:
    alone = spec.world_size == product_of_others(spec.parallelism)
    return when(spec.parallelism.data_parallel.static_graph and alone)


STATIC_GRAPH_RULES = (
    Rule(
        id="StaticGraphIsOfDdp",
        path=_PATH,
        sentence="`staticGraph` is a setting of DDP, which does not sum the gradients by itself with `{other}`: remove"
        " one of the two",
        check=_with_another,
        cel=f"!{_CEL}.staticGraph || {_OTHER} == ''",
        values={"other": _OTHER},
        reads=(
            "spec.parallelism.dataParallel",
            "spec.parallelism.dataParallelShardDegree",
            "spec.parallelism.tensorParallelDegree",
            "spec.parallelism.pipelineParallelDegree",
            "spec.training.offload.parameters",
        ),
    ),
    Rule(
        id="StaticGraphNeedsReplicas",
        path=_PATH,
        sentence="`staticGraph` is about gradients of several replicas, and there is one: add workers, or remove it",
        check=_without_replicas,
        cel=f"!{_CEL}.staticGraph || {WORLD} != {OTHERS}",
        reads=(_PATH, *READS_LAYOUT),
    ),
)
