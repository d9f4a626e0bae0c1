"""Fields that exclude or need each other: a setting that would be ignored is refused."""

from collections.abc import Callable

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.run_policy import RestartPolicy, RunPolicy
from disttrain_api.spec import JobSpec
from disttrain_api.training import (
    Loss,
    LossName,
    LrSchedule,
    LrScheduleName,
    Optimizer,
    OptimizerName,
    Training,
    WeightDecayOn,
)

_DEFAULT_MAX_RESTARTS: int = RunPolicy.model_fields["max_restarts"].default


def _pascal(alias: str) -> str:
    return alias[0].upper() + alias[1:]


def _in_training(wrong: Callable[[Training], bool]) -> Callable[[JobSpec], Values | None]:
    """A check of `spec.training`, which may be absent."""
    return lambda spec: when(spec.training is not None and wrong(spec.training))


def _of_cross_entropy(spec: JobSpec) -> Values | None:
    """The first setting of CrossEntropy that another loss was given."""
    loss = spec.training.loss if spec.training is not None else Loss()
    settings = {"labelSmoothing": loss.label_smoothing, "chunks": loss.chunks}
    found = [alias for alias, value in settings.items() if value is not None]
    if not found or loss.name is LossName.CROSS_ENTROPY:
        return None
    return {"setting": found[0], "loss": loss.name.value}


def _name_or_entrypoint(part: str) -> Rule:
    def wrong(training: Training) -> bool:
        source = getattr(training, part)
        given = (source.name is not None) + (source.entrypoint is not None)
        return given != (0 if training.task is not None else 1)

    return Rule(
        id=f"{_pascal(part)}NameOrEntrypoint",
        path=f"spec.training.{part}",
        scope="spec.training",
        sentence="exactly one of `name` and `entrypoint` must be given, none with a task",
        check=_in_training(wrong),
        cel=f"has(self.task) ? !has(self.{part}.name) && !has(self.{part}.entrypoint)"
        f" : has(self.{part}.name) != has(self.{part}.entrypoint)",
        reads=(f"spec.training.{part}", "spec.training.task"),
    )


_WITH_MOMENTUM = (OptimizerName.SGD, OptimizerName.MUON)
_WITH_MOMENTS = (OptimizerName.ADAM, OptimizerName.ADAMW, OptimizerName.MUON)
_OF_NAMED = (
    ("momentum", "momentum", _WITH_MOMENTUM),
    ("nesterov", "nesterov", _WITH_MOMENTUM),
    ("beta1", "beta1", _WITH_MOMENTS),
    ("beta2", "beta2", _WITH_MOMENTS),
    ("epsilon", "epsilon", _WITH_MOMENTS),
    ("beta2Decay", "beta2_decay", (OptimizerName.ADAFACTOR,)),
    ("d", "d", (OptimizerName.ADAFACTOR,)),
    ("nsSteps", "ns_steps", (OptimizerName.MUON,)),
    ("adjustLrFn", "adjust_lr_fn", (OptimizerName.MUON,)),
)
"""Settings, and the optimizers that have them."""
# The first setting that belongs to another optimizer, or ''.
_FOREIGN = "".join(
    f"has(self.{alias}) && !(self.name in {[name.value for name in names]}) ? '{alias}' : "
    for alias, _, names in _OF_NAMED
)


def _foreign_setting(spec: JobSpec) -> Values | None:
    """The first setting that belongs to another optimizer."""
    found = spec.training.optimizer if spec.training is not None else Optimizer()
    for alias, field, names in _OF_NAMED:
        if getattr(found, field) is not None and found.name not in names:
            return {"setting": alias, "name": found.name.value}
    return None


def _own_with_others(spec: JobSpec) -> Values | None:
    found = spec.training.optimizer if spec.training is not None else Optimizer()
    # Those of others are refused by themselves.
    others = [getattr(found, field) for _, field, names in _OF_NAMED if OptimizerName.ADAMW in names]
    named = found.name is not OptimizerName.ADAMW or any(value is not None for value in others)
    return when(found.entrypoint is not None and named)


def _cut_matrices(spec: JobSpec) -> Values | None:
    """The first setting that leaves the optimizer no whole matrices."""
    if spec.training is None or spec.training.optimizer.name not in _OF_MATRICES:
        return None
    name = spec.training.optimizer.name
    for alias, cuts in (
        ("offload.parameters", spec.training.offload.parameters),
        ("dataParallelShardDegree", (spec.parallelism.data_parallel_shard_degree or 1) > 1),
        ("tensorParallelDegree", (spec.parallelism.tensor_parallel_degree or 1) > 1),
    ):
        # Muon gathers them, on the device.
        if cuts and (name is OptimizerName.ADAFACTOR or alias == "offload.parameters"):
            return {"name": name.value, "setting": alias}
    return None


_OF_MATRICES = (OptimizerName.ADAFACTOR, OptimizerName.MUON)
_CUT = (
    "self.training.offload.parameters ? 'offload.parameters' : self.training.optimizer.name == 'Muon' ? '' : "
    + "".join(
        f"{given(f'self.parallelism.?{alias}', '1')} > 1 ? '{alias}' : "
        for alias in ("dataParallelShardDegree", "tensorParallelDegree")
    )
    + "''"
)


def _own_schedule_with_others(spec: JobSpec) -> Values | None:
    found = spec.training.lr_schedule if spec.training is not None else LrSchedule()
    return when(found.entrypoint is not None and found != LrSchedule(entrypoint=found.entrypoint))


def _own_on_servers(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.parallelism.data_parallel.mode is not DataParallelMode.PARAMETER_SERVER:
        return None
    return when(spec.training.optimizer.entrypoint is not None or spec.training.lr_schedule.entrypoint is not None)


def _groups_with_servers(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.parallelism.data_parallel.mode is not DataParallelMode.PARAMETER_SERVER:
        return None
    optimizer = spec.training.optimizer
    return when(bool(optimizer.groups) or optimizer.weight_decay_on is not WeightDecayOn.ALL)


def _profiled_too_late(spec: JobSpec) -> Values | None:
    training = spec.training
    if training is None or training.profiling is None:
        return None
    end = training.profiling.first_step + training.profiling.steps - 1
    return when(end > training.steps, end=end, steps=training.steps)


_PROFILED = "self.profiling.firstStep + self.profiling.steps - 1"

SETTING_RULES = (
    _name_or_entrypoint("model"),
    _name_or_entrypoint("data"),
    Rule(
        id="SettingNeedsOptimizer",
        path="spec.training.optimizer",
        scope="spec.training.optimizer",
        sentence="`{setting}` is not a setting of {name}: remove it or change `name`",
        check=_foreign_setting,
        cel=f"({_FOREIGN}'') == ''",
        values={"setting": f"{_FOREIGN}''", "name": "self.name"},
    ),
    Rule(
        id="WholeMatrices",
        path="spec.training.optimizer.name",
        sentence="the optimizer {name} needs whole matrices on the device, and `{setting}` prevents that: remove one"
        " of the two",
        check=_cut_matrices,
        cel=f"!has(self.training) || !(self.training.optimizer.name in {[name.value for name in _OF_MATRICES]})"
        f" || ({_CUT}) == ''",
        values={"name": "self.training.optimizer.name", "setting": _CUT},
        reads=("spec.training.optimizer.name", "spec.training.offload", "spec.parallelism"),
    ),
    Rule(
        id="OptimizerEntrypointAlone",
        path="spec.training.optimizer.entrypoint",
        scope="spec.training.optimizer",
        sentence="`entrypoint` replaces `name` and its settings: remove these",
        check=_own_with_others,
        cel="!has(self.entrypoint) || (self.name == 'AdamW'"
        f"{''.join(f' && !has(self.{alias})' for alias, _, names in _OF_NAMED if OptimizerName.ADAMW in names)})",
        reads=("spec.training.optimizer",),
    ),
    Rule(
        id="LrScheduleEntrypointAlone",
        path="spec.training.lrSchedule.entrypoint",
        scope="spec.training.lrSchedule",
        sentence="`entrypoint` replaces `name` and its settings: remove these",
        check=_own_schedule_with_others,
        cel="!has(self.entrypoint) || (self.name == 'Constant' && self.warmupSteps == 0 && !has(self.minimumRatio))",
        reads=("spec.training.lrSchedule",),
    ),
    Rule(
        id="EntrypointOnServers",
        path="spec.training",
        sentence="an `entrypoint` of `optimizer` or `lrSchedule` conflicts with `mode` ParameterServer, where servers"
        " update the parameters: remove it, or use AllReduce",
        check=_own_on_servers,
        cel="!has(self.training) || self.parallelism.dataParallel.mode != 'ParameterServer'"
        " || !has(self.training.optimizer.entrypoint) && !has(self.training.lrSchedule.entrypoint)",
        reads=("spec.training", "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="GroupsWithServers",
        path="spec.training.optimizer",
        sentence="`groups` and `weightDecayOn` select parameters by name and shape, which servers do not know: remove"
        " them, or the mode ParameterServer",
        check=_groups_with_servers,
        cel="!has(self.training) || self.parallelism.dataParallel.mode != 'ParameterServer'"
        " || (size(self.training.optimizer.groups) == 0 && self.training.optimizer.weightDecayOn == 'All')",
        reads=("spec.training.optimizer", "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="NesterovNeedsMomentum",
        path="spec.training.optimizer.nesterov",
        scope="spec.training.optimizer",
        sentence="`nesterov` needs `momentum` greater than 0",
        check=_in_training(
            lambda training: (
                training.optimizer.name is OptimizerName.SGD
                and bool(training.optimizer.nesterov)
                and not training.optimizer.momentum
            )
        ),
        cel="!has(self.nesterov) || !self.nesterov || self.name != 'SGD'"
        " || (has(self.momentum) && self.momentum > 0.0)",
        reads=("spec.training.optimizer.nesterov", "spec.training.optimizer.momentum"),
    ),
    Rule(
        id="MinimumRatioNeedsShape",
        path="spec.training.lrSchedule.minimumRatio",
        scope="spec.training.lrSchedule",
        sentence="`minimumRatio` is a setting of Linear and Cosine, not of Constant: remove it or change `name`",
        check=_in_training(
            lambda training: (
                training.lr_schedule.minimum_ratio is not None and training.lr_schedule.name is LrScheduleName.CONSTANT
            )
        ),
        cel="!has(self.minimumRatio) || self.name != 'Constant'",
        reads=("spec.training.lrSchedule.minimumRatio", "spec.training.lrSchedule.name"),
    ),
    Rule(
        id="WarmupWithinSteps",
        path="spec.training.lrSchedule.warmupSteps",
        scope="spec.training",
        sentence="`warmupSteps` {warmup} must be less than or equal to `steps` {steps}",
        check=lambda spec: when(
            spec.training is not None and spec.training.lr_schedule.warmup_steps > spec.training.steps,
            warmup=spec.training.lr_schedule.warmup_steps if spec.training else 0,
            steps=spec.training.steps if spec.training else 0,
        ),
        cel="self.lrSchedule.warmupSteps <= self.steps",
        values={"warmup": "self.lrSchedule.warmupSteps", "steps": "self.steps"},
        reads=("spec.training.lrSchedule.warmupSteps", "spec.training.steps"),
    ),
    Rule(
        id="ProfilingWithinSteps",
        path="spec.training.profiling",
        scope="spec.training",
        sentence="`profiling` ends with step {end} (`firstStep` + `steps` - 1), which must be less than or equal to"
        " `training.steps` {steps}",
        check=_profiled_too_late,
        cel=f"!has(self.profiling) || {_PROFILED} <= self.steps",
        values={"end": _PROFILED, "steps": "self.steps"},
        reads=("spec.training.profiling", "spec.training.steps"),
    ),
    Rule(
        id="SettingNeedsCrossEntropy",
        path="spec.training.loss",
        scope="spec.training.loss",
        sentence="`{setting}` is a setting of CrossEntropy, not of {loss}: remove it or change `name`",
        check=_of_cross_entropy,
        cel="self.name == 'CrossEntropy' || !has(self.labelSmoothing) && !has(self.chunks)",
        values={"setting": "has(self.labelSmoothing) ? 'labelSmoothing' : 'chunks'", "loss": "self.name"},
    ),
    Rule(
        id="CheckpointNeedsStorage",
        path="spec.training.checkpoint",
        sentence="`training.checkpoint` needs `spec.storage`, which outlives the pods: set it, or remove `checkpoint`",
        check=lambda spec: when(
            spec.training is not None and spec.training.checkpoint is not None and spec.storage is None
        ),
        cel="has(self.storage) || !self.?training.?checkpoint.hasValue()",
        reads=("spec.storage",),
    ),
    Rule(
        id="MaxRestartsNeedsGang",
        path="spec.runPolicy.maxRestarts",
        scope="spec.runPolicy",
        sentence="`maxRestarts` {restarts} is a setting of restartPolicy Gang, not of Never: remove it or change"
        " `restartPolicy`",
        # The default stands in every stored object and says nothing; zero says what Never says.
        check=lambda spec: when(
            spec.run_policy.restart_policy is RestartPolicy.NEVER
            and spec.run_policy.max_restarts not in (0, _DEFAULT_MAX_RESTARTS),
            restarts=spec.run_policy.max_restarts,
        ),
        cel=f"self.restartPolicy != 'Never' || self.maxRestarts in [0, {_DEFAULT_MAX_RESTARTS}]",
        values={"restarts": "self.maxRestarts"},
        reads=("spec.runPolicy.maxRestarts", "spec.runPolicy.restartPolicy"),
    ),
)
