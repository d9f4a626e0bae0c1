"""Fields that exclude or need each other: a setting that would be ignored is refused."""

from collections.abc import Callable

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.rules.rule import Rule, Values, when
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


def _smoothed_otherwise(spec: JobSpec) -> Values | None:
    loss = spec.training.loss if spec.training is not None else Loss()
    return when(loss.label_smoothing is not None and loss.name is not LossName.CROSS_ENTROPY, loss=loss.name.value)


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


def _optimizer_only(alias: str, field: str, *names: OptimizerName) -> Rule:
    return Rule(
        id=f"{_pascal(alias)}NeedsOptimizer",
        path=f"spec.training.optimizer.{alias}",
        scope="spec.training.optimizer",
        sentence=f"`{alias}` is a setting of {' and '.join(names)}, not of {{name}}: remove it or change `name`",
        check=lambda spec: when(
            spec.training is not None
            and getattr(spec.training.optimizer, field) is not None
            and spec.training.optimizer.name not in names,
            name=spec.training.optimizer.name.value if spec.training else "",
        ),
        cel=f"!has(self.{alias}) || self.name in [{', '.join(repr(name.value) for name in names)}]",
        values={"name": "self.name"},
        reads=(f"spec.training.optimizer.{alias}", "spec.training.optimizer.name"),
    )


def _own_with_others(spec: JobSpec) -> Values | None:
    found = spec.training.optimizer if spec.training is not None else Optimizer()
    others = [getattr(found, alias) for alias in _OF_NAMED]
    named = found.name is not OptimizerName.ADAMW or any(value is not None for value in others)
    return when(found.entrypoint is not None and named)


def _own_schedule_with_others(spec: JobSpec) -> Values | None:
    found = spec.training.lr_schedule if spec.training is not None else LrSchedule()
    return when(found.entrypoint is not None and found != LrSchedule(entrypoint=found.entrypoint))


def _own_on_servers(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.parallelism.data_parallel.mode is not DataParallelMode.PARAMETER_SERVER:
        return None
    return when(spec.training.optimizer.entrypoint is not None or spec.training.lr_schedule.entrypoint is not None)


_OF_NAMED = ("momentum", "nesterov", "beta1", "beta2", "epsilon")


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
    _optimizer_only("momentum", "momentum", OptimizerName.SGD),
    _optimizer_only("nesterov", "nesterov", OptimizerName.SGD),
    _optimizer_only("beta1", "beta1", OptimizerName.ADAM, OptimizerName.ADAMW),
    _optimizer_only("beta2", "beta2", OptimizerName.ADAM, OptimizerName.ADAMW),
    _optimizer_only("epsilon", "epsilon", OptimizerName.ADAM, OptimizerName.ADAMW),
    Rule(
        id="OptimizerEntrypointAlone",
        path="spec.training.optimizer.entrypoint",
        scope="spec.training.optimizer",
        sentence="`entrypoint` takes the place of `name` and its settings: remove these",
        check=_own_with_others,
        cel=f"!has(self.entrypoint) || (self.name == 'AdamW'{''.join(f' && !has(self.{one})' for one in _OF_NAMED)})",
        reads=("spec.training.optimizer",),
    ),
    Rule(
        id="LrScheduleEntrypointAlone",
        path="spec.training.lrSchedule.entrypoint",
        scope="spec.training.lrSchedule",
        sentence="`entrypoint` takes the place of `name` and its settings: remove these",
        check=_own_schedule_with_others,
        cel="!has(self.entrypoint) || (self.name == 'Constant' && self.warmupSteps == 0 && !has(self.minimumRatio))",
        reads=("spec.training.lrSchedule",),
    ),
    Rule(
        id="EntrypointOnServers",
        path="spec.training",
        sentence="an `entrypoint` of `optimizer` or `lrSchedule` does not go with `mode` ParameterServer, where servers"
        " update the parameters: remove it, or use AllReduce",
        check=_own_on_servers,
        cel="!has(self.training) || self.parallelism.dataParallel.mode != 'ParameterServer'"
        " || !has(self.training.optimizer.entrypoint) && !has(self.training.lrSchedule.entrypoint)",
        reads=("spec.training", "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="GroupsWithServers",
        path="spec.training.optimizer",
        sentence="`groups` and `weightDecayOn` go by names and shapes of parameters, which servers do not know: remove"
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
        check=_in_training(lambda training: bool(training.optimizer.nesterov) and not training.optimizer.momentum),
        cel="!has(self.nesterov) || !self.nesterov || (has(self.momentum) && self.momentum > 0.0)",
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
        id="LabelSmoothingNeedsCrossEntropy",
        path="spec.training.loss.labelSmoothing",
        scope="spec.training.loss",
        sentence="`labelSmoothing` is a setting of CrossEntropy, not of {loss}: remove it or change `name`",
        check=_smoothed_otherwise,
        cel="!has(self.labelSmoothing) || self.name == 'CrossEntropy'",
        values={"loss": "self.name"},
        reads=("spec.training.loss.labelSmoothing", "spec.training.loss.name"),
    ),
    Rule(
        id="CheckpointNeedsStorage",
        path="spec.training.checkpoint",
        sentence="`training.checkpoint` needs `spec.storage`, where checkpoints outlive the pods: give it, or remove"
        " `checkpoint`",
        check=lambda spec: when(
            spec.training is not None and spec.training.checkpoint is not None and spec.storage is None
        ),
        cel="!has(self.training) || !has(self.training.checkpoint) || has(self.storage)",
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
