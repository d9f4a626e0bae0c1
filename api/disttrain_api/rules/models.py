"""Rules for what a model must offer: normalisation over replicas, its own loss, the meta device."""

from disttrain_api.compute import ActivationCheckpointing
from disttrain_api.parallelism import DeviceMode
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import LossName, ModelName

_PATH = "spec.parallelism.dataParallel.syncBatchNorm"
_OFF = "!self.parallelism.dataParallel.syncBatchNorm"
_MODE = given("self.parallelism.?deviceMode", "'Replicate'")
_WITHOUT = (ModelName.MLP.value, ModelName.GPT.value, ModelName.TRANSFORMERS.value)


def _wanted(spec: JobSpec) -> bool:
    return spec.parallelism.data_parallel.sync_batch_norm


def _nothing_to_normalise(spec: JobSpec) -> Values | None:
    name = spec.training.model.name if spec.training is not None else None
    return when(_wanted(spec) and name in _WITHOUT, model=name.value if name else "")


def _recomputed(spec: JobSpec) -> Values | None:
    if spec.training is None:
        return None
    kind = spec.training.activation_checkpointing
    return when(_wanted(spec) and kind is not ActivationCheckpointing.NONE, kind=kind.value)


def _copies(spec: JobSpec) -> Values | None:
    return when(_wanted(spec) and _has_copies(spec), devices=spec.parallelism.devices_per_process or 1)


def _has_copies(spec: JobSpec) -> bool:
    several = (spec.parallelism.devices_per_process or 1) > 1
    return several and spec.parallelism.device_mode is not DeviceMode.PLACE


MODEL_RULES = (
    Rule(
        id="SyncBatchNormNeedsLayers",
        path=_PATH,
        sentence="`syncBatchNorm` needs BatchNorm layers, which '{model}' does not have: remove it",
        check=_nothing_to_normalise,
        cel=f"{_OFF} || !has(self.training) || !has(self.training.model.name)"
        f" || !(self.training.model.name in {list(_WITHOUT)})",
        values={"model": "self.training.model.name"},
        reads=(_PATH, "spec.training.model.name"),
    ),
    Rule(
        id="SyncBatchNormWithRecomputation",
        path=_PATH,
        sentence="`syncBatchNorm` conflicts with `activationCheckpointing` {kind}: recomputed batches would count"
        " twice in the running statistics; remove one of the two",
        check=_recomputed,
        cel=f"{_OFF} || !has(self.training) || self.training.activationCheckpointing == 'None'",
        values={"kind": "self.training.activationCheckpointing"},
        reads=(_PATH, "spec.training.activationCheckpointing"),
    ),
    Rule(
        id="SyncBatchNormWithDevices",
        path=_PATH,
        scope="spec.parallelism",
        sentence="`syncBatchNorm` conflicts with `devicesPerProcess` {devices}, whose copies would wait for each"
        " other: run a process per device, or use `deviceMode` Place",
        check=_copies,
        cel="!self.dataParallel.syncBatchNorm || !has(self.devicesPerProcess) || self.devicesPerProcess == 1"
        " || (has(self.deviceMode) && self.deviceMode == 'Place')",
        values={"devices": "self.devicesPerProcess"},
        reads=(_PATH, "spec.parallelism.devicesPerProcess", "spec.parallelism.deviceMode"),
    ),
    Rule(
        id="ModelsLossNeedsEntrypoint",
        path="spec.training.loss.name",
        scope="spec.training",
        sentence="`loss.name` Model needs a model of your own, which '{model}' is not: use CrossEntropy or"
        " MeanSquaredError, or set `model.entrypoint`",
        check=lambda spec: when(
            spec.training is not None
            and spec.training.loss.name is LossName.MODEL
            and spec.training.model.name is not None,
            model=spec.training.model.name or "" if spec.training else "",
        ),
        cel="self.loss.name != 'Model' || !has(self.model.name)",
        values={"model": "self.model.name"},
        reads=("spec.training.loss.name", "spec.training.model.name"),
    ),
    Rule(
        id="ChunksWithDevices",
        path="spec.training.loss.chunks",
        sentence="`chunks` conflicts with `devicesPerProcess`, whose copies return logits: use `deviceMode` Place, or"
        " a process per device",
        check=lambda spec: when(
            spec.training is not None and spec.training.loss.chunks is not None and _has_copies(spec)
        ),
        cel="!self.?training.loss.?chunks.hasValue()"
        f" || {given('self.parallelism.?devicesPerProcess', '1')} == 1"
        f" || {_MODE} == 'Place'",
        reads=("spec.training.loss", "spec.parallelism.devicesPerProcess", "spec.parallelism.deviceMode"),
    ),
    Rule(
        id="MetaDeviceNeedsModel",
        path="spec.training.model.metaDevice",
        scope="spec.training.model",
        sentence="`metaDevice` needs a model that is initialised by layers, which '{model}' is not: remove it",
        check=lambda spec: when(
            spec.training is not None
            and spec.training.model.meta_device
            and spec.training.model.name in (ModelName.MLP, ModelName.RESNET),
            model=spec.training.model.name or "" if spec.training else "",
        ),
        cel="!self.metaDevice || !has(self.name) || !(self.name in ['mlp', 'resnet'])",
        values={"model": "self.name"},
        reads=("spec.training.model.metaDevice", "spec.training.model.name"),
    ),
)
