"""Rules that refuse a user's task where more must be known of a model and its batches than a task provides."""

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import LossName

_LAYOUTS = {
    "pipelineParallelDegree": "pipeline_parallel_degree",
    "devicesPerProcess": "devices_per_process",
}
_CUTS = {"sequenceParallel": "sequence_parallel", "vocabularyParallel": "vocabulary_parallel"}
_SERVERS = "dataParallel.mode"


def _against(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.training.task is None:
        return None
    parallelism = spec.parallelism
    degrees = any((getattr(parallelism, field) or 1) > 1 for field in _LAYOUTS.values())
    cuts = any(getattr(parallelism, field) for field in _CUTS.values())
    return when(degrees or cuts or parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER)


def _other_loss(spec: JobSpec) -> Values | None:
    training = spec.training
    if training is None or training.task is None:
        return None
    loss = training.loss
    settings = loss.label_smoothing is not None or loss.chunks is not None
    return when(loss.name is not LossName.CROSS_ENTROPY or settings)


_HERE = "self.parallelism"
_WRONG = " || ".join(
    [
        *(f"{given(f'{_HERE}.?{alias}', '1')} > 1" for alias in _LAYOUTS),
        *(given(f"{_HERE}.?{alias}", "false") for alias in _CUTS),
        f"{_HERE}.{_SERVERS} == 'ParameterServer'",
    ]
)

TASK_RULES = (
    Rule(
        id="TaskWithLayout",
        path="spec.training.task",
        sentence="`task` conflicts with `pipelineParallelDegree`, `devicesPerProcess`, `sequenceParallel`,"
        " `vocabularyParallel` and parameter servers, which need batches of an input and a target: use replicas,"
        " sharding or tensor groups",
        check=_against,
        cel=f"!self.?training.?task.hasValue() || !({_WRONG})",
        reads=("spec.training.task", *(f"spec.parallelism.{alias}" for alias in (*_LAYOUTS, *_CUTS, _SERVERS))),
    ),
    Rule(
        id="TaskWithLoss",
        path="spec.training.loss",
        scope="spec.training",
        sentence="`task` has a loss of its own: remove `loss`",
        check=_other_loss,
        cel="!has(self.task) || (self.loss.name == 'CrossEntropy' && !has(self.loss.labelSmoothing)"
        " && !has(self.loss.chunks))",
        reads=("spec.training.loss", "spec.training.task"),
    ),
)
