"""Parameters on servers: what such a job needs, and what conflicts with it."""

from disttrain_api.compute import Precision
from disttrain_api.parallelism import (
    AllReduce,
    CompressionName,
    DataParallel,
    DataParallelMode,
    GroupReduce,
    Pushed,
    Synchronization,
)
from disttrain_api.rules.layout import OTHERS, PROCESSES, READS_LAYOUT, product_of_others
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec
from disttrain_api.training import OptimizerName

_DATA_PARALLEL = "spec.parallelism.dataParallel"
_MODE = f"{_DATA_PARALLEL}.mode"
_SETTINGS = f"{_DATA_PARALLEL}.parameterServer"
_CEL = "self.parallelism.dataParallel"
_SYNC, _GRADIENTS = "'Sync'", "'Gradients'"
_IS_MODE = f"{_CEL}.mode == 'ParameterServer'"
_IS_SYNC = f"({given(f'{_CEL}.?parameterServer.?synchronization', _SYNC)} == 'Sync')"
_PUSHES_GRADIENTS = f"({given(f'{_CEL}.?parameterServer.?push', _GRADIENTS)} == 'Gradients')"
_HAS_GROUPS = f"({_CEL}.?parameterServer.?groupReduce.hasValue() && {_IS_MODE})"
_DEGREES = tuple(
    (alias, field, f"({given(f'self.parallelism.?{alias}', '1')} > 1)")
    for alias, field in (
        ("expertParallelDegree", "expert_parallel_degree"),
        ("devicesPerProcess", "devices_per_process"),
    )
)
_NAME = "self.training.optimizer.name"
_UNFIT = " : ".join(
    [
        *(f"{cel} ? '{alias}'" for alias, _, cel in _DEGREES),
        f"{_CEL}.allReduce != 'Backend' ? 'allReduce'",
        f"{_CEL}.syncBatchNorm ? 'syncBatchNorm'",
        "has(self.training) && self.training.offload.parameters ? 'offload.parameters'",
        "has(self.training) && self.training.precision == 'FP16' ? 'precision: FP16'",
        f"has(self.training) && {_NAME} in ['Adafactor', 'Muon'] ? 'optimizer.name: ' + {_NAME}",
        "''",
    ]
)


def _data_parallel(spec: JobSpec) -> DataParallel:
    return spec.parallelism.data_parallel


def _has_mode(spec: JobSpec) -> bool:
    return _data_parallel(spec).mode is DataParallelMode.PARAMETER_SERVER


def _synchronization(spec: JobSpec) -> Synchronization:
    settings = _data_parallel(spec).parameter_server
    return Synchronization.SYNC if settings is None else settings.synchronization


def _pushes_parameters(spec: JobSpec) -> bool:
    settings = _data_parallel(spec).parameter_server
    return settings is not None and settings.push is Pushed.PARAMETERS


def _unfit(spec: JobSpec) -> str | None:
    """The first setting that conflicts with servers."""
    for alias, field, _ in _DEGREES:
        if (getattr(spec.parallelism, field) or 1) > 1:
            return alias
    if _data_parallel(spec).all_reduce is not AllReduce.BACKEND:
        return "allReduce"
    if _data_parallel(spec).sync_batch_norm:
        return "syncBatchNorm"
    if spec.training is not None and spec.training.offload.parameters:
        return "offload.parameters"
    if spec.training is None:
        return None
    name = spec.training.optimizer.name
    unfit = f"optimizer.name: {name.value}" if name in (OptimizerName.ADAFACTOR, OptimizerName.MUON) else None
    return "precision: FP16" if spec.training.precision is Precision.FP16 else unfit


def _servers_with_unfit(spec: JobSpec) -> Values | None:
    setting = _unfit(spec)
    return {"setting": setting} if _has_mode(spec) and setting is not None else None


def _has_groups(spec: JobSpec) -> bool:
    settings = _data_parallel(spec).parameter_server
    return _has_mode(spec) and settings is not None and settings.group_reduce is GroupReduce.WITHIN_GROUP


def _cut_without_groups(spec: JobSpec) -> Values | None:
    return when(_has_mode(spec) and not _has_groups(spec) and product_of_others(spec.parallelism) > 1)


def _cut_across_pods(spec: JobSpec) -> Values | None:
    product, processes = product_of_others(spec.parallelism), spec.workers.ranks_per_pod
    return when(_has_groups(spec) and processes % product != 0, product=product, processes=processes)


def _setting_of_other_synchronization(spec: JobSpec) -> Values | None:
    settings = _data_parallel(spec).parameter_server
    if settings is None:
        return None
    found = settings.synchronization
    if settings.staleness is not None and found is not Synchronization.BOUNDED_STALENESS:
        return {"setting": "staleness", "synchronization": found.value}
    for alias, value in (
        ("stalenessAwareRate", settings.staleness_aware_rate),
        ("snapshotInterval", settings.snapshot_interval),
    ):
        if value is not None and found is Synchronization.SYNC:
            return {"setting": alias, "synchronization": found.value}
    return None


def _snapshots_without_storage(spec: JobSpec) -> Values | None:
    settings = _data_parallel(spec).parameter_server
    return when(spec.storage is None and settings is not None and settings.snapshot_interval is not None)


_OTHER_SETTING = (
    "(has(self.staleness) && self.synchronization != 'BoundedStaleness' ? 'staleness'"
    " : self.synchronization != 'Sync' ? '' : has(self.stalenessAwareRate) ? 'stalenessAwareRate'"
    " : has(self.snapshotInterval) ? 'snapshotInterval' : '')"
)

SERVER_RULES = (
    Rule(
        id="ModeNeedsServers",
        path=_MODE,
        sentence="`mode` ParameterServer needs `spec.training` and `spec.parameterServers`, whose `replicas` says how"
        " many servers hold the parameters: add them, or use AllReduce",
        check=lambda spec: when(_has_mode(spec) and (spec.training is None or spec.parameter_servers is None)),
        cel=f"!({_IS_MODE}) || (has(self.training) && has(self.parameterServers))",
        reads=(_MODE, "spec.training", "spec.parameterServers"),
    ),
    Rule(
        id="ServersNeedMode",
        path="spec.parameterServers",
        sentence="`parameterServers` beside `training` need `parallelism.dataParallel.mode` ParameterServer: set it, or"
        " remove `parameterServers`",
        check=lambda spec: when(
            spec.parameter_servers is not None and spec.training is not None and not _has_mode(spec)
        ),
        cel=f"!has(self.parameterServers) || !has(self.training) || {_IS_MODE}",
        reads=(_MODE, "spec.training", "spec.parameterServers"),
    ),
    Rule(
        id="ServersWithOthers",
        path=_MODE,
        sentence="`mode` ParameterServer conflicts with `{setting}`, which it does not support: remove one of the two",
        check=_servers_with_unfit,
        cel=f"!({_IS_MODE}) || ({_UNFIT}) == ''",
        values={"setting": _UNFIT},
        reads=(
            _DATA_PARALLEL,
            *(f"spec.parallelism.{alias}" for alias, *_ in _DEGREES),
            "spec.training.offload.parameters",
            "spec.training.precision",
            "spec.training.optimizer.name",
        ),
    ),
    Rule(
        id="CutModelsNeedGroups",
        path="spec.parallelism",
        sentence="with `mode` ParameterServer ranks can share a model only where the ranks of a pod are one worker:"
        " set `parameterServer.groupReduce` WithinGroup, or set the shard, tensor and pipeline degrees to 1",
        check=_cut_without_groups,
        cel=f"!({_IS_MODE}) || {_HAS_GROUPS} || {OTHERS} == 1",
        reads=("spec.parallelism",),
    ),
    Rule(
        id="GroupsArePods",
        path="spec.parallelism",
        sentence="`groupReduce` WithinGroup: ranks that share a model must be in one pod, so the processes per pod,"
        " {processes}, must be a multiple of the product of the degrees, which is {product}: set"
        " `workers.processesPerPod`",
        check=_cut_across_pods,
        cel=f"!{_HAS_GROUPS} || ({PROCESSES}) % ({OTHERS}) == 0",
        values={"product": OTHERS, "processes": PROCESSES},
        reads=READS_LAYOUT,
    ),
    Rule(
        id="GroupsHaveRanks",
        path=f"{_SETTINGS}.groupReduce",
        sentence="`groupReduce` WithinGroup sums over the ranks of a pod, and there is one: set"
        " `workers.processesPerPod`, or remove it",
        check=lambda spec: when(_has_groups(spec) and spec.workers.ranks_per_pod == 1),
        cel=f"!{_HAS_GROUPS} || {PROCESSES} > 1",
        reads=(_SETTINGS, *READS_LAYOUT),
    ),
    Rule(
        id="GroupsPushGradients",
        path=f"{_SETTINGS}.groupReduce",
        scope=_SETTINGS,
        sentence="`groupReduce` sums gradients, and with `push` Parameters each rank updates: use `push` Gradients, or"
        " remove `groupReduce`",
        check=lambda spec: when(_has_groups(spec) and _pushes_parameters(spec)),
        cel="!has(self.groupReduce) || self.push == 'Gradients'",
        reads=(_SETTINGS, _MODE),
    ),
    Rule(
        id="ServersWithClipping",
        path="spec.training.maxGradientNorm",
        sentence="`maxGradientNorm` conflicts with `synchronization` Sync: each server sees only its part of the"
        " gradient; use Async or BoundedStaleness, where workers clip what they push",
        check=lambda spec: when(
            _has_mode(spec)
            and _synchronization(spec) is Synchronization.SYNC
            and not _pushes_parameters(spec)
            and spec.training is not None
            and spec.training.max_gradient_norm is not None
        ),
        cel=f"!({_IS_MODE}) || !{_IS_SYNC} || !{_PUSHES_GRADIENTS} || !has(self.training)"
        " || !has(self.training.maxGradientNorm)",
        reads=(_DATA_PARALLEL, "spec.training.maxGradientNorm"),
    ),
    Rule(
        id="ServersWithPreflight",
        path="spec.training.preflight",
        sentence="`preflight` checks links between ranks, and with `mode` ParameterServer workers send to servers:"
        " remove it, or use AllReduce",
        check=lambda spec: when(_has_mode(spec) and spec.training is not None and spec.training.preflight),
        cel=f"!({_IS_MODE}) || !has(self.training) || !self.training.preflight",
        reads=(_MODE, "spec.training.preflight"),
    ),
    Rule(
        id="ServersWithDataWorkers",
        path="spec.training.dataWorkers",
        sentence="`dataWorkers` conflict with `mode` ParameterServer, where a worker gets its samples when a step"
        " begins: remove it, or use AllReduce",
        check=lambda spec: when(_has_mode(spec) and spec.training is not None and spec.training.data_workers > 0),
        cel=f"!({_IS_MODE}) || !has(self.training) || self.training.dataWorkers == 0",
        reads=(_MODE, "spec.training.dataWorkers"),
    ),
    Rule(
        id="PowerSgdOnServers",
        path=f"{_DATA_PARALLEL}.compression",
        scope=_DATA_PARALLEL,
        sentence="compression PowerSGD conflicts with `mode` ParameterServer: it needs whole matrices and an"
        " all-reduce, and servers hold ranges of numbers; use another compression, for example TopK",
        check=lambda spec: when(
            _has_mode(spec) and getattr(_data_parallel(spec).compression, "name", None) is CompressionName.POWER_SGD
        ),
        cel="self.mode != 'ParameterServer' || !has(self.compression) || self.compression.name != 'PowerSGD'",
        reads=(f"{_DATA_PARALLEL}.compression", _MODE),
    ),
    Rule(
        id="CompressionOfPushedParameters",
        path=f"{_DATA_PARALLEL}.compression",
        scope=_DATA_PARALLEL,
        sentence="`compression` conflicts with `push` Parameters: what it leaves out of the parameters would stay in"
        " the optimizer's state; use `push` Gradients, or remove `compression`",
        check=lambda spec: when(_pushes_parameters(spec) and _data_parallel(spec).compression is not None),
        cel="!has(self.compression) || !has(self.parameterServer) || self.parameterServer.push == 'Gradients'",
        reads=(f"{_DATA_PARALLEL}.compression", f"{_SETTINGS}.push"),
    ),
    Rule(
        id="SettingsOfServersNeedMode",
        path=_SETTINGS,
        scope=_DATA_PARALLEL,
        sentence="`parameterServer` has settings of `mode` ParameterServer: use this mode, or remove them",
        check=lambda spec: when(_data_parallel(spec).parameter_server is not None and not _has_mode(spec)),
        cel="!has(self.parameterServer) || self.mode == 'ParameterServer'",
        reads=(_SETTINGS, _MODE),
    ),
    Rule(
        id="SettingOfAnotherSynchronization",
        path=_SETTINGS,
        scope=_SETTINGS,
        sentence="`{setting}` is not a setting of `synchronization` {synchronization}: remove it, or change"
        " `synchronization`",
        check=_setting_of_other_synchronization,
        cel=f"{_OTHER_SETTING} == ''",
        values={"setting": _OTHER_SETTING, "synchronization": "self.synchronization"},
    ),
    Rule(
        id="SnapshotsNeedVolume",
        path=f"{_SETTINGS}.snapshotInterval",
        sentence="`snapshotInterval` needs a volume in `spec.storage`: add `claimName` or"
        " `volumeClaimTemplate`, or remove the interval",
        check=lambda spec: when(
            (spec.storage is None or spec.storage.url is not None)
            and getattr(_data_parallel(spec).parameter_server, "snapshot_interval", None) is not None
        ),
        cel=f"(has(self.storage) && !has(self.storage.url)) || !{_CEL}.?parameterServer.?snapshotInterval.hasValue()",
        reads=("spec.storage", _SETTINGS),
    ),
)
