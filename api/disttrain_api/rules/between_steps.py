"""Rules for features that act between two steps of all ranks, and for layouts whose ranks are never there together."""

from disttrain_api.parallelism import DataParallelMode
from disttrain_api.pipeline import FLUSHLESS_SCHEDULES, schedule_of
from disttrain_api.rules.flushless import FLUSHLESS
from disttrain_api.rules.rule import Rule, when
from disttrain_api.spec import JobSpec

_MODE = "parallelism.dataParallel.mode"
_APART = f"(self.{_MODE} == 'ParameterServer' || {FLUSHLESS})"
_READS = (f"spec.{_MODE}", "spec.parallelism.pipeline", "spec.parallelism.pipelineParallelDegree")


def _apart(spec: JobSpec) -> bool:
    """Whether ranks are in different steps at the same time."""
    servers = spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER
    return servers or schedule_of(spec.parallelism) in FLUSHLESS_SCHEDULES


BETWEEN_STEPS_RULES = (
    Rule(
        id="CallbacksWithLayout",
        path="spec.training.callbacks",
        sentence="`callbacks` are called between two steps of all ranks, which parameter servers, PipeDream and"
        " PipeDream2BW do not have: remove them",
        check=lambda spec: when(spec.training is not None and bool(spec.training.callbacks) and _apart(spec)),
        cel=f"!has(self.training) || size(self.training.callbacks) == 0 || !{_APART}",
        reads=("spec.training.callbacks", *_READS),
    ),
)
