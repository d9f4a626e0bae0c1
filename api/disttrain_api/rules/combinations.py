"""Techniques that do not go together, or not with what is trained: the one table of refusals, each with its reason."""

from disttrain_api.compute import Precision
from disttrain_api.rules.layout import PROCESSES
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import Loss, LossName, ModelName

_TENSOR = given("self.parallelism.?tensorParallelDegree", "1")
_EXPERT = given("self.parallelism.?expertParallelDegree", "1")
_WITHOUT_EXPERTS = [name.value for name in ModelName if name not in (ModelName.GPT, ModelName.TRANSFORMERS)]
_MODEL = given("self.?training.?model.?name", "''")
_ASYNC = given("self.parallelism.?asyncTensorParallel", "false")
_DEVICES = given("self.?devicesPerProcess", "1")


def _tensor(spec: JobSpec) -> int:
    return spec.parallelism.tensor_parallel_degree or 1


def _expert(spec: JobSpec) -> int:
    return spec.parallelism.expert_parallel_degree or 1


def _model(spec: JobSpec) -> str:
    return spec.training.model.name or "" if spec.training is not None else ""


def _devices(spec: JobSpec) -> int:
    return spec.parallelism.devices_per_process or 1


def _device_rule(what: str, alias: str, field: str) -> Rule:
    def degree(spec: JobSpec) -> int:
        return getattr(spec.parallelism, field) or 1

    cel = given(f"self.?{alias}", "1")
    return Rule(
        id=f"DevicesWith{what}",
        path="spec.parallelism.devicesPerProcess",
        scope="spec.parallelism",
        sentence=f"`devicesPerProcess` {{devices}} conflicts with `{alias}` {{degree}}, which needs a process per"
        " device: remove one of the two",
        check=lambda spec: when(_devices(spec) > 1 and degree(spec) > 1, devices=_devices(spec), degree=degree(spec)),
        cel=f"{_DEVICES} == 1 || {cel} == 1",
        values={"devices": _DEVICES, "degree": cel},
        reads=("spec.parallelism.devicesPerProcess", f"spec.parallelism.{alias}"),
    )


def _gpus_of_devices(spec: JobSpec) -> Values | None:
    gpus, processes = spec.workers.gpus_per_pod, spec.workers.ranks_per_pod
    if gpus is None or spec.parallelism.devices_per_process is None or gpus == processes * _devices(spec):
        return None
    return {"gpus": gpus, "processes": processes, "devices": _devices(spec)}


def _async(spec: JobSpec) -> bool:
    return bool(spec.parallelism.async_tensor_parallel)


def _async_between_pods(spec: JobSpec) -> Values | None:
    degree, processes = _tensor(spec), spec.workers.ranks_per_pod
    return when(_async(spec) and processes % degree > 0, degree=degree, processes=processes)


def _needs_tensor(alias: str, field: str) -> Rule:
    return Rule(
        id=f"{alias[0].upper()}{alias[1:]}NeedsTensor",
        path=f"spec.parallelism.{alias}",
        scope="spec.parallelism",
        sentence=f"`{alias}` needs `tensorParallelDegree` greater than 1: it shards within the tensor group",
        check=lambda spec: when(bool(getattr(spec.parallelism, field)) and _tensor(spec) == 1),
        cel=f"!{given(f'self.?{alias}', 'false')} || {given('self.?tensorParallelDegree', '1')} > 1",
        reads=(f"spec.parallelism.{alias}", "spec.parallelism.tensorParallelDegree"),
    )


def _needs_tokens(alias: str, field: str) -> Rule:
    others = [name.value for name in ModelName if name not in (ModelName.GPT, ModelName.TRANSFORMERS)]
    return Rule(
        id=f"{alias[0].upper()}{alias[1:]}NeedsTokens",
        path=f"spec.parallelism.{alias}",
        sentence=f"`{alias}` needs a model of tokens, which '{{model}}' is not: remove it, or use another model",
        check=lambda spec: when(bool(getattr(spec.parallelism, field)) and _model(spec) in others, model=_model(spec)),
        cel=f"!{given(f'self.parallelism.?{alias}', 'false')} || !({_MODEL} in {others})",
        values={"model": _MODEL},
        reads=(f"spec.parallelism.{alias}", "spec.training.model.name"),
    )


def _whole_logits(spec: JobSpec) -> Values | None:
    loss = (spec.training.loss if spec.training is not None else Loss()).name
    return when(bool(spec.parallelism.vocabulary_parallel) and loss is not LossName.CROSS_ENTROPY, loss=loss.value)


def _float8(spec: JobSpec) -> bool:
    return spec.training is not None and spec.training.float8 is not None


def _float8_of(spec: JobSpec) -> Values | None:
    precision = spec.training.precision if spec.training is not None else Precision.BF16
    return when(_float8(spec) and precision is not Precision.BF16, precision=precision.value)


COMBINATION_RULES = (
    Rule(
        id="Float8NeedsBF16",
        path="spec.training.float8",
        scope="spec.training",
        sentence="`float8` needs `precision` BF16, found {precision}: what is not multiplied in FP8 is BF16",
        check=_float8_of,
        cel="!has(self.float8) || self.precision == 'BF16'",
        values={"precision": "self.precision"},
        reads=("spec.training.float8", "spec.training.precision"),
    ),
    Rule(
        id="TensorNeedsPlan",
        path="spec.parallelism.tensorParallelDegree",
        sentence="the model 'resnet' has no tensor plan: `tensorParallelDegree` must be 1, found {degree}; use"
        " `dataParallelShardDegree`",
        check=lambda spec: when(_tensor(spec) > 1 and _model(spec) == ModelName.RESNET, degree=_tensor(spec)),
        cel=f"{_TENSOR} == 1 || {_MODEL} != 'resnet'",
        values={"degree": _TENSOR},
        reads=("spec.parallelism.tensorParallelDegree", "spec.training.model.name"),
    ),
    Rule(
        id="ExpertsNeedExperts",
        path="spec.parallelism.expertParallelDegree",
        sentence="the model '{model}' has no experts: `expertParallelDegree` must be 1, found {degree}; use"
        " `dataParallelShardDegree`",
        check=lambda spec: when(
            _expert(spec) > 1 and _model(spec) in _WITHOUT_EXPERTS, model=_model(spec), degree=_expert(spec)
        ),
        cel=f"{_EXPERT} == 1 || !({_MODEL} in {_WITHOUT_EXPERTS})",
        values={"model": _MODEL, "degree": _EXPERT},
        reads=("spec.parallelism.expertParallelDegree", "spec.training.model.name"),
    ),
    _needs_tensor("sequenceParallel", "sequence_parallel"),
    _needs_tensor("vocabularyParallel", "vocabulary_parallel"),
    _needs_tokens("sequenceParallel", "sequence_parallel"),
    _needs_tokens("vocabularyParallel", "vocabulary_parallel"),
    Rule(
        id="AsyncTensorParallelNeedsSequence",
        path="spec.parallelism.asyncTensorParallel",
        scope="spec.parallelism",
        sentence="`asyncTensorParallel` needs `sequenceParallel`: it overlaps what is gathered and scattered along the"
        " sequence",
        check=lambda spec: when(_async(spec) and not spec.parallelism.sequence_parallel),
        cel=f"!{given('self.?asyncTensorParallel', 'false')} || {given('self.?sequenceParallel', 'false')}",
        reads=("spec.parallelism.asyncTensorParallel", "spec.parallelism.sequenceParallel"),
    ),
    Rule(
        id="AsyncTensorParallelNeedsCompile",
        path="spec.parallelism.asyncTensorParallel",
        sentence="`asyncTensorParallel` needs `training.compile`: the compiler finds what can overlap",
        check=lambda spec: when(_async(spec) and spec.training is not None and not spec.training.compile),
        cel=f"!{_ASYNC} || !has(self.training) || self.training.compile",
        reads=("spec.parallelism.asyncTensorParallel", "spec.training.compile"),
    ),
    Rule(
        id="AsyncTensorParallelWithinPods",
        path="spec.parallelism.asyncTensorParallel",
        sentence="`asyncTensorParallel` needs tensor groups within a pod, whose GPUs reach each other's memory:"
        " `tensorParallelDegree` {degree} must divide the processes per pod, which are {processes}",
        check=_async_between_pods,
        cel=f"!{_ASYNC} || ({PROCESSES}) % {_TENSOR} == 0",
        values={"degree": _TENSOR, "processes": PROCESSES},
        reads=(
            "spec.parallelism.asyncTensorParallel",
            "spec.parallelism.tensorParallelDegree",
            "spec.workers.gpusPerPod",
            "spec.workers.processesPerPod",
        ),
    ),
    Rule(
        id="VocabularyParallelNeedsCrossEntropy",
        path="spec.parallelism.vocabularyParallel",
        sentence="`vocabularyParallel` shards the logits, and the loss {loss} needs all of them: use CrossEntropy, or"
        " remove it",
        check=_whole_logits,
        cel=f"!{given('self.parallelism.?vocabularyParallel', 'false')} || !has(self.training)"
        " || self.training.loss.name == 'CrossEntropy'",
        values={"loss": "self.training.loss.name"},
        reads=("spec.parallelism.vocabularyParallel", "spec.training.loss.name"),
    ),
    _device_rule("Shards", "dataParallelShardDegree", "data_parallel_shard_degree"),
    _device_rule("Tensor", "tensorParallelDegree", "tensor_parallel_degree"),
    _device_rule("Pipeline", "pipelineParallelDegree", "pipeline_parallel_degree"),
    Rule(
        id="DeviceModeNeedsDevices",
        path="spec.parallelism.deviceMode",
        scope="spec.parallelism",
        sentence="`deviceMode` needs `devicesPerProcess` greater than 1: set it, or remove `deviceMode`",
        check=lambda spec: when(spec.parallelism.device_mode is not None and _devices(spec) == 1),
        cel=f"!has(self.deviceMode) || {_DEVICES} > 1",
        reads=("spec.parallelism.deviceMode", "spec.parallelism.devicesPerProcess"),
    ),
    Rule(
        id="DevicesWithOffload",
        path="spec.parallelism.devicesPerProcess",
        sentence="`devicesPerProcess` {devices} conflicts with `offload.parameters`, which needs a process per"
        " device: remove one of the two",
        check=lambda spec: when(
            _devices(spec) > 1 and spec.training is not None and spec.training.offload.parameters,
            devices=_devices(spec),
        ),
        cel=f"{given('self.parallelism.?devicesPerProcess', '1')} == 1 || !has(self.training)"
        " || !self.training.offload.parameters",
        values={"devices": "self.parallelism.devicesPerProcess"},
        reads=("spec.parallelism.devicesPerProcess", "spec.training.offload.parameters"),
    ),
    Rule(
        id="GpusAreDevices",
        path="spec.workers.gpusPerPod",
        sentence="`gpusPerPod` {gpus} must equal processes per pod x `devicesPerProcess`, which is {processes} x"
        " {devices}",
        check=_gpus_of_devices,
        cel="!has(self.workers.gpusPerPod) || !has(self.parallelism.devicesPerProcess)"
        f" || self.workers.gpusPerPod == {PROCESSES} * self.parallelism.devicesPerProcess",
        values={
            "gpus": "self.workers.gpusPerPod",
            "processes": PROCESSES,
            "devices": "self.parallelism.devicesPerProcess",
        },
        reads=("spec.workers.gpusPerPod", "spec.workers.processesPerPod", "spec.parallelism.devicesPerProcess"),
    ),
)
