"""Degrees against the world size, and what is not built yet."""

from math import prod

from disttrain_api.names import DEFAULT_GPU_RESOURCE
from disttrain_api.parallelism import Parallelism
from disttrain_api.pipeline import SINGLE_STAGE_SCHEDULES
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec

# CEL, with `self` = spec. Defaults are filled in before, so `workers.replicas` and `parallelism` are there.
PODS = "self.workers.replicas"
PROCESSES = given("self.workers.?processesPerPod", given("self.workers.?gpusPerPod", "1"))
WORLD = f"{PODS} * {PROCESSES}"
_REPLICATE = "self.parallelism.dataParallelReplicateDegree"


def _degree(name: str) -> str:
    return given(f"self.parallelism.?{name}", "1")


SHARD = _degree("dataParallelShardDegree")
PIPELINE = _degree("pipelineParallelDegree")
CONTEXT = _degree("contextParallelDegree")
# Product of the degrees that cut one replica: its model or its sequences.
CUTS = f"{CONTEXT} * {_degree('tensorParallelDegree')} * {PIPELINE}"
# Product of every degree that is a factor of the world size, but the replicate degree.
OTHERS = f"{SHARD} * {CUTS}"
_SETTINGS = "self.parallelism.pipeline"
SCHEDULE = given("self.parallelism.?pipeline.?schedule", "'1F1B'")
# Where there are settings.
_STAGES_PER_RANK = (
    f"(has({_SETTINGS}.stagesPerRank) ? {_SETTINGS}.stagesPerRank : !has({_SETTINGS}.schedule)"
    f" || {_SETTINGS}.schedule in {[str(name) for name in SINGLE_STAGE_SCHEDULES]} ? 1 : 2)"
)
STAGES_PER_RANK = f"(has({_SETTINGS}) ? {_STAGES_PER_RANK} : 1)"
STAGES = f"({PIPELINE} * {STAGES_PER_RANK})"
_DEGREE = "self.parallelism.pipelineParallelDegree"
# As in disttrain_api.pipeline: 1 without a pipeline, else as many as stages where not given, and 1 with PipeDream.
MICROBATCHES = (
    f"(!has({_DEGREE}) || {_DEGREE} == 1 ? 1 : !has({_SETTINGS}) ? {_DEGREE}"
    f" : has({_SETTINGS}.microbatches) ? {_SETTINGS}.microbatches"
    f" : has({_SETTINGS}.schedule) && {_SETTINGS}.schedule == 'PipeDream' ? 1 : {_DEGREE} * {_STAGES_PER_RANK})"
)
# With `self` = spec.parallelism.
EXPERT = _degree("expertParallelDegree").replace("self.parallelism", "self")
EXPERT_RANKS = " * ".join(
    _degree(name).replace("self.parallelism", "self")
    for name in ("dataParallelShardDegree", "contextParallelDegree", "tensorParallelDegree")
)
# True where the degrees do not fit the world size.
MISFIT = f"(has({_REPLICATE}) ? {WORLD} != {_REPLICATE} * {OTHERS} : ({WORLD}) % ({OTHERS}) != 0)"

READS_LAYOUT = (
    "spec.workers.replicas",
    "spec.workers.processesPerPod",
    "spec.workers.gpusPerPod",
    "spec.parallelism",
)


def product_of_others(parallelism: Parallelism) -> int:
    """Product of all degrees that are factors of the world size, but the replicate degree."""
    return prod(
        degree or 1
        for degree in (
            parallelism.data_parallel_shard_degree,
            parallelism.context_parallel_degree,
            parallelism.tensor_parallel_degree,
            parallelism.pipeline_parallel_degree,
        )
    )


def layout_fits(spec: JobSpec) -> bool:
    """Whether the degrees fit the world size."""
    return _product_differs(spec) is None and _does_not_divide(spec) is None


def _world(spec: JobSpec, product: int) -> Values:
    return {
        "world": spec.world_size,
        "pods": spec.workers.replicas,
        "processes": spec.workers.ranks_per_pod,
        "product": product,
    }


def _product_differs(spec: JobSpec) -> Values | None:
    replicate = spec.parallelism.data_parallel_replicate_degree
    if replicate is None:
        return None
    product = replicate * product_of_others(spec.parallelism)
    return _world(spec, product) if product != spec.world_size else None


def _does_not_divide(spec: JobSpec) -> Values | None:
    product = product_of_others(spec.parallelism)
    if spec.parallelism.data_parallel_replicate_degree is not None or spec.world_size % product == 0:
        return None
    return _world(spec, product)


def _experts_do_not_divide(spec: JobSpec) -> Values | None:
    at = spec.parallelism
    degree = at.expert_parallel_degree or 1
    degrees = (at.data_parallel_shard_degree, at.context_parallel_degree, at.tensor_parallel_degree)
    ranks = prod(one or 1 for one in degrees)
    return when(ranks % degree != 0, degree=degree, product=ranks)


def _gpus_do_not_divide(spec: JobSpec) -> Values | None:
    gpus, processes = spec.workers.gpus_per_pod, spec.workers.processes_per_pod
    if gpus is None or processes is None or gpus % processes == 0:
        return None
    return {"gpus": gpus, "processes": processes}


LAYOUT_RULES = (
    Rule(
        id="WorldSizeEqualsDegrees",
        path="spec.parallelism",
        sentence="world size {world} ({pods} pods x {processes} processes) must equal the product of the degrees,"
        " which is {product}",
        check=_product_differs,
        cel=f"!has({_REPLICATE}) || {WORLD} == {_REPLICATE} * {OTHERS}",
        values={"world": WORLD, "pods": PODS, "processes": PROCESSES, "product": f"{_REPLICATE} * {OTHERS}"},
        reads=READS_LAYOUT,
    ),
    Rule(
        id="WorldSizeMultipleOfDegrees",
        path="spec.parallelism",
        sentence="world size {world} ({pods} pods x {processes} processes) must be a multiple of the product of"
        " the degrees, which is {product}: every stage and shard has the same number of replicas",
        check=_does_not_divide,
        cel=f"has({_REPLICATE}) || ({WORLD}) % ({OTHERS}) == 0",
        values={"world": WORLD, "pods": PODS, "processes": PROCESSES, "product": OTHERS},
        reads=READS_LAYOUT,
    ),
    Rule(
        id="ExpertsDivideRanks",
        path="spec.parallelism.expertParallelDegree",
        scope="spec.parallelism",
        sentence="`expertParallelDegree` {degree} must divide the product of the shard, context and tensor degrees,"
        " which is {product}: experts are spread over those ranks; raise `dataParallelShardDegree`",
        check=_experts_do_not_divide,
        cel=f"({EXPERT_RANKS}) % {EXPERT} == 0",
        values={"degree": EXPERT, "product": EXPERT_RANKS},
        reads=("spec.parallelism",),
    ),
    Rule(
        id="GpusMultipleOfProcesses",
        path="spec.workers.gpusPerPod",
        scope="spec.workers",
        sentence="`gpusPerPod` {gpus} must be a multiple of `processesPerPod` {processes}",
        check=_gpus_do_not_divide,
        cel="!has(self.gpusPerPod) || !has(self.processesPerPod) || self.gpusPerPod % self.processesPerPod == 0",
        values={"gpus": "self.gpusPerPod", "processes": "self.processesPerPod"},
        reads=("spec.workers.gpusPerPod", "spec.workers.processesPerPod"),
    ),
    Rule(
        id="GpuResourceNeedsGpus",
        path="spec.workers.gpuResource",
        scope="spec.workers",
        sentence="`gpuResource` needs `gpusPerPod`: set how many each pod gets",
        check=lambda spec: when(
            spec.workers.gpus_per_pod is None and spec.workers.gpu_resource != DEFAULT_GPU_RESOURCE
        ),
        cel=f"has(self.gpusPerPod) || self.gpuResource == '{DEFAULT_GPU_RESOURCE}'",
        reads=("spec.workers.gpuResource", "spec.workers.gpusPerPod"),
    ),
)
