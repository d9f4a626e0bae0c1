"""Context parallelism, where ranks compute parts of the same sequences: what goes with it, and what does not."""

from disttrain_api.compute import Attention
from disttrain_api.parallelism import AllReduce, ContextParallelMethod, DataParallelMode, PipelineSplit
from disttrain_api.pipeline import FLUSHLESS_SCHEDULES
from disttrain_api.rules.rule import Rule, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import LossName, ModelName

_PATH = "spec.parallelism.contextParallelDegree"
_DEGREE = given("self.?contextParallelDegree", "1")
_OF_JOB = given("self.parallelism.?contextParallelDegree", "1")
_OTHER_MODELS = [name.value for name in ModelName if name not in (ModelName.GPT, ModelName.TRANSFORMERS)]
_MODEL = given("self.?training.?model.?name", "''")
_METHOD, _ATTENTION = given("self.parallelism.?contextParallelMethod", "''"), given("self.?training.?attention", "''")
_SCHEDULE, _SPLIT = (given(f"self.?pipeline.?{name}", "''") for name in ("schedule", "split"))
# The first setting that does not go with it, or ''.
_OTHER = " : ".join(
    [
        f"{given('self.?devicesPerProcess', '1')} > 1 ? 'devicesPerProcess'",
        "self.dataParallel.mode != 'AllReduce' ? 'dataParallel.mode'",
        "self.dataParallel.allReduce != 'Backend' ? 'dataParallel.allReduce'",
        "has(self.dataParallel.compression) ? 'dataParallel.compression'",
        "self.dataParallel.syncBatchNorm ? 'dataParallel.syncBatchNorm'",
        f"{_SCHEDULE} in {[str(name) for name in FLUSHLESS_SCHEDULES]} ? 'pipeline.schedule'",
        f"{_SPLIT} == 'Time' ? 'pipeline.split'",
        "''",
    ]
)
_OF_TRAINING = (
    "(!has(self.training) ? '' : has(self.training.task) ? 'task'"
    " : self.training.loss.name != 'CrossEntropy' ? 'loss.name' : '')"
)


def _degree(spec: JobSpec) -> int:
    return spec.parallelism.context_parallel_degree or 1


def _other(spec: JobSpec) -> str:
    """The first setting of the layout that does not go with it, or ''."""
    parallelism = spec.parallelism
    settings, pipeline = parallelism.data_parallel, parallelism.pipeline
    given = {
        "devicesPerProcess": (parallelism.devices_per_process or 1) > 1,
        "dataParallel.mode": settings.mode is not DataParallelMode.ALL_REDUCE,
        "dataParallel.allReduce": settings.all_reduce is not AllReduce.BACKEND,
        "dataParallel.compression": settings.compression is not None,
        "dataParallel.syncBatchNorm": settings.sync_batch_norm,
        "pipeline.schedule": pipeline is not None and pipeline.schedule in FLUSHLESS_SCHEDULES,
        # One rank measures it, and a layer's ranks compute together.
        "pipeline.split": pipeline is not None and pipeline.split is PipelineSplit.TIME,
    }
    return next((name for name, is_given in given.items() if is_given), "")


def _of_training(spec: JobSpec) -> str:
    """The first setting of the training that does not go with it, or ''."""
    training = spec.training
    if training is None:
        return ""
    if training.task is not None:
        return "task"
    return "loss.name" if training.loss.name is not LossName.CROSS_ENTROPY else ""


def _attention(spec: JobSpec) -> str:
    """The kernel of attention that a ring does not have, or ''."""
    attention = spec.training.attention if spec.training is not None else None
    on_a_ring = spec.parallelism.context_parallel_method is ContextParallelMethod.RING
    return str(attention) if on_a_ring and attention in (Attention.CUDNN, Attention.EFFICIENT) else ""


def _model(spec: JobSpec) -> str:
    return spec.training.model.name or "" if spec.training is not None else ""


CONTEXT_RULES = (
    Rule(
        id="ContextMethodNeedsDegree",
        path="spec.parallelism.contextParallelMethod",
        scope="spec.parallelism",
        sentence="`contextParallelMethod` needs `contextParallelDegree` greater than 1",
        check=lambda spec: when(spec.parallelism.context_parallel_method is not None and _degree(spec) == 1),
        cel=f"!has(self.contextParallelMethod) || {_DEGREE} > 1",
        reads=("spec.parallelism",),
    ),
    Rule(
        id="ContextWithLayout",
        path=_PATH,
        scope="spec.parallelism",
        sentence="`contextParallelDegree` {degree} conflicts with `{setting}`: use replicas, shards, tensor and"
        " expert groups and pipelines that are flushed beside it, or remove one of the two",
        check=lambda spec: when(_degree(spec) > 1 and bool(_other(spec)), degree=_degree(spec), setting=_other(spec)),
        cel=f"{_DEGREE} == 1 || ({_OTHER}) == ''",
        values={"degree": _DEGREE, "setting": _OTHER},
        reads=("spec.parallelism",),
    ),
    Rule(
        id="RingAttention",
        path="spec.training.attention",
        sentence="`contextParallelMethod` Ring has no kernel {attention}: use Flash or Math, or Ulysses",
        check=lambda spec: when(bool(_attention(spec)), attention=_attention(spec)),
        cel=f"{_METHOD} != 'Ring' || !({_ATTENTION} in ['CuDNN', 'Efficient'])",
        values={"attention": _ATTENTION},
        reads=("spec.training.attention", "spec.parallelism.contextParallelMethod"),
    ),
    Rule(
        id="ContextNeedsModel",
        path=_PATH,
        sentence="the model '{model}' does not compute parts of sequences: `contextParallelDegree` must be 1, found"
        " {degree}; use the model gpt or transformers, or `dataParallelShardDegree`",
        check=lambda spec: when(
            _degree(spec) > 1 and _model(spec) in _OTHER_MODELS, model=_model(spec), degree=_degree(spec)
        ),
        cel=f"{_OF_JOB} == 1 || !({_MODEL} in {_OTHER_MODELS})",
        values={"model": _MODEL, "degree": _OF_JOB},
        reads=(_PATH, "spec.training.model.name"),
    ),
    Rule(
        id="ContextWithTraining",
        path=_PATH,
        sentence="`contextParallelDegree` {degree} conflicts with `training.{setting}`: it needs batches of tokens"
        " and CrossEntropy; remove one of the two",
        check=lambda spec: when(
            _degree(spec) > 1 and bool(_of_training(spec)), degree=_degree(spec), setting=_of_training(spec)
        ),
        cel=f"{_OF_JOB} == 1 || {_OF_TRAINING} == ''",
        values={"degree": _OF_JOB, "setting": _OF_TRAINING},
        reads=(_PATH, "spec.training.task", "spec.training.loss.name"),
    ),
)
