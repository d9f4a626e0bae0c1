"""How gradients are summed, and what of them is sent: which settings go together, and with which techniques."""

from disttrain_api.compute import Precision
from disttrain_api.parallelism import AllReduce, CompressionName, DataParallel, DataParallelMode
from disttrain_api.rules.layout import OTHERS, PIPELINE, READS_LAYOUT, SHARD, WORLD, product_of_others
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import OptimizerName

_DATA_PARALLEL = "spec.parallelism.dataParallel"
_COMPRESSION = f"{_DATA_PARALLEL}.compression"
_SPARSE = (CompressionName.TOP_K, CompressionName.RANDOM_K)
KEEP_THE_REST = (CompressionName.ONE_BIT, *_SPARSE, CompressionName.POWER_SGD)
_SUMMED = (CompressionName.FP16, CompressionName.BF16, CompressionName.RANDOM_K)

_CEL = "self.parallelism.dataParallel"
_HAS_HOOK = f"(has({_CEL}.compression) || {_CEL}.allReduce != 'Backend')"
TENSOR_CUTS = f"({given('self.parallelism.?tensorParallelDegree', '1')} > 1)"
OFFLOADS = "(has(self.training) && self.training.offload.parameters)"
_CUT_BY = (
    f"({SHARD} > 1 ? 'dataParallelShardDegree' : {TENSOR_CUTS} ? 'tensorParallelDegree'"
    f" : {PIPELINE} > 1 ? 'pipelineParallelDegree' : 'offload.parameters')"
)
COMPRESSION_NAME = given(f"{_CEL}.?compression.?name", "''")


def _data_parallel(spec: JobSpec) -> DataParallel:
    return spec.parallelism.data_parallel


def _compression(spec: JobSpec) -> CompressionName | None:
    compression = _data_parallel(spec).compression
    return None if compression is None else compression.name


def has_hook(spec: JobSpec) -> bool:
    return _compression(spec) is not None or _data_parallel(spec).all_reduce is not AllReduce.BACKEND


def cut_by(spec: JobSpec) -> str | None:
    """The setting with which gradients are not DDP's to sum."""
    if (spec.parallelism.data_parallel_shard_degree or 1) > 1:
        return "dataParallelShardDegree"
    if (spec.parallelism.tensor_parallel_degree or 1) > 1:
        return "tensorParallelDegree"
    if (spec.parallelism.pipeline_parallel_degree or 1) > 1:
        return "pipelineParallelDegree"
    return "offload.parameters" if spec.training is not None and spec.training.offload.parameters else None


def _hook_without_ddp(spec: JobSpec) -> Values | None:
    cut = cut_by(spec)
    return {"cut": cut} if cut is not None and has_hook(spec) else None


def _hook_without_replicas(spec: JobSpec) -> Values | None:
    # What a worker pushes to servers may be compressed also where it is the only one.
    to_servers = _data_parallel(spec).mode is DataParallelMode.PARAMETER_SERVER
    return when(has_hook(spec) and not to_servers and spec.world_size == product_of_others(spec.parallelism))


def _own_exchange(spec: JobSpec) -> Values | None:
    name, algorithm = _compression(spec), _data_parallel(spec).all_reduce
    if name is None or name in _SUMMED or algorithm is AllReduce.BACKEND:
        return None
    return {"name": name.value, "algorithm": algorithm.value}


def _scaled_rest(spec: JobSpec) -> Values | None:
    name = _compression(spec)
    fp16 = spec.training is not None and spec.training.precision is Precision.FP16
    return {"name": name.value} if fp16 and name in KEEP_THE_REST and name is not None else None


def _momentum_twice(spec: JobSpec) -> Values | None:
    compression = _data_parallel(spec).compression
    if spec.training is None or compression is None or not compression.momentum_correction:
        return None
    optimizer = spec.training.optimizer
    return when(optimizer.name is not OptimizerName.SGD or bool(optimizer.momentum))


def _foreign_setting(spec: JobSpec) -> Values | None:
    """The first setting that belongs to another compression."""
    compression = _data_parallel(spec).compression
    if compression is None:
        return None
    for alias, field, names in _SETTINGS:
        if getattr(compression, field) is not None and compression.name not in names:
            return {"setting": alias, "name": compression.name.value}
    return None


def list_of(names: tuple[CompressionName, ...]) -> str:
    return f"[{', '.join(repr(name.value) for name in names)}]"


_SETTINGS = (
    ("rank", "rank", (CompressionName.POWER_SGD,)),
    ("ratio", "ratio", _SPARSE),
    ("momentumCorrection", "momentum_correction", _SPARSE),
    ("warmupSteps", "warmup_steps", KEEP_THE_REST),
)
# The first setting that belongs to another compression, or ''.
_FOREIGN = " : ".join(
    [*(f"has(self.{alias}) && !(self.name in {list_of(names)}) ? '{alias}'" for alias, _, names in _SETTINGS), "''"]
)


GRADIENT_SUM_RULES = (
    Rule(
        id="SettingOfAnotherCompression",
        path=_COMPRESSION,
        scope=_COMPRESSION,
        sentence="`{setting}` is not a setting of {name}: remove it or change `name`",
        check=_foreign_setting,
        cel=f"({_FOREIGN}) == ''",
        values={"setting": _FOREIGN, "name": "self.name"},
    ),
    Rule(
        id="HookNeedsDdp",
        path=_DATA_PARALLEL,
        sentence="`allReduce` and `compression` are hooks of DDP, which does not reduce gradients with `{cut}`: remove"
        " one of the two",
        check=_hook_without_ddp,
        cel=f"!{_HAS_HOOK} || ({SHARD} == 1 && !{TENSOR_CUTS} && {PIPELINE} == 1 && !{OFFLOADS})",
        values={"cut": _CUT_BY},
        reads=(
            _DATA_PARALLEL,
            "spec.parallelism.dataParallelShardDegree",
            "spec.parallelism.tensorParallelDegree",
            "spec.parallelism.pipelineParallelDegree",
            "spec.training.offload.parameters",
        ),
    ),
    Rule(
        id="HookNeedsReplicas",
        path=_DATA_PARALLEL,
        sentence="`allReduce` and `compression` need several replicas, and there is one: add workers, or remove them",
        check=_hook_without_replicas,
        cel=f"!{_HAS_HOOK} || {_CEL}.mode == 'ParameterServer' || {WORLD} != {OTHERS}",
        reads=(_DATA_PARALLEL, *READS_LAYOUT),
    ),
    Rule(
        id="CompressionHasOwnExchange",
        path=f"{_DATA_PARALLEL}.allReduce",
        scope=_DATA_PARALLEL,
        sentence="`allReduce` {algorithm} conflicts with compression {name}, which has an exchange of its own: use"
        " Backend",
        check=_own_exchange,
        cel=f"self.allReduce == 'Backend' || !has(self.compression) || self.compression.name in {list_of(_SUMMED)}",
        values={"algorithm": "self.allReduce", "name": "self.compression.name"},
        reads=(f"{_DATA_PARALLEL}.allReduce", f"{_COMPRESSION}.name"),
    ),
    Rule(
        id="Fp16WithKeptGradients",
        path="spec.training.precision",
        sentence="precision FP16 conflicts with compression {name}, which keeps an error for the next step, whose"
        " loss scale may differ: use BF16 or FP32",
        check=_scaled_rest,
        cel="!has(self.training) || self.training.precision != 'FP16'"
        f" || !({COMPRESSION_NAME} in {list_of(KEEP_THE_REST)})",
        values={"name": COMPRESSION_NAME},
        reads=("spec.training.precision", f"{_COMPRESSION}.name"),
    ),
    Rule(
        id="MomentumCorrectionNeedsPlainSgd",
        path=f"{_COMPRESSION}.momentumCorrection",
        sentence="`momentumCorrection` replaces the momentum of SGD: use the optimizer SGD without `momentum`",
        check=_momentum_twice,
        cel=f"!has(self.training) || !has({_CEL}.compression) || !has({_CEL}.compression.momentumCorrection)"
        f" || {_CEL}.compression.momentumCorrection == 0.0 || (self.training.optimizer.name == 'SGD'"
        " && (!has(self.training.optimizer.momentum) || self.training.optimizer.momentum == 0.0))",
        reads=(f"{_COMPRESSION}.momentumCorrection", "spec.training.optimizer"),
    ),
)
