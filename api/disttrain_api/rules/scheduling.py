"""Which settings of `schedulingPolicy` go together."""

from collections.abc import Mapping
from typing import Any

from disttrain_api.rules.rule import Rule, when
from disttrain_api.scheduling import GangScheduler, SchedulingPolicy
from disttrain_api.spec import JobSpec

_PATH = "spec.runPolicy.schedulingPolicy"
_GANG = f"{_PATH}.gangScheduler"
_WITH_QUEUES = (GangScheduler.KUEUE, GangScheduler.VOLCANO)
_WITH_TIMEOUT = (GangScheduler.GATE, GangScheduler.COSCHEDULING)


def _policy(spec: JobSpec) -> SchedulingPolicy:
    return spec.run_policy.scheduling_policy


def _not_one_topology(spec: JobSpec) -> bool:
    topology = _policy(spec).topology
    return topology is not None and (topology.required is None) == (topology.preferred is None)


_HARD = "requiredDuringSchedulingIgnoredDuringExecution"


def _below(value: Any, *keys: str) -> Any:
    """Return the value below the keys in plain JSON, or None if something on the way is absent or has the wrong
    type."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _needs_other_pods(template: Mapping[str, Any]) -> bool:
    """Whether nodes are fit for the template's pods only beside, or away from, other pods."""
    affinity = [_below(template, "spec", "affinity", kind, _HARD) for kind in ("podAffinity", "podAntiAffinity")]
    spread = _below(template, "spec", "topologySpreadConstraints")
    entries = spread if isinstance(spread, list) else []
    return any(affinity) or any(_below(entry, "whenUnsatisfiable") == "DoNotSchedule" for entry in entries)


def _cel_needs_other_pods(template: str) -> str:
    pod = f"{template}.spec"
    affinity = " || ".join(
        f"(has({pod}.affinity.{kind}) && has({pod}.affinity.{kind}.{_HARD})"
        f" && {pod}.affinity.{kind}.{_HARD}.size() > 0)"
        for kind in ("podAffinity", "podAntiAffinity")
    )
    spread = f"{pod}.topologySpreadConstraints"
    return (
        f"(has({pod}) && ((has({pod}.affinity) && ({affinity}))"
        f" || (has({spread}) && {spread}.exists(c, c.whenUnsatisfiable == 'DoNotSchedule'))))"
    )


def _gate_cannot_see(spec: JobSpec) -> bool:
    templates = [spec.workers.template, spec.parameter_servers.template if spec.parameter_servers else {}]
    return _policy(spec).gang_scheduler is GangScheduler.GATE and any(map(_needs_other_pods, templates))


SCHEDULING_RULES = (
    Rule(
        id="GateSeesNodesOnly",
        path=_GANG,
        sentence="`gangScheduler` Gate ignores rules between pods: remove required podAffinity"
        " and podAntiAffinity and topologySpreadConstraints with DoNotSchedule from the templates, or make them"
        " preferences (`topology` puts pods together)",
        check=lambda spec: when(_gate_cannot_see(spec)),
        cel="self.runPolicy.schedulingPolicy.gangScheduler != 'Gate'"
        f" || (!{_cel_needs_other_pods('self.workers.template')} && (!has(self.parameterServers)"
        f" || !{_cel_needs_other_pods('self.parameterServers.template')}))",
        reads=(_GANG, "spec.workers.template", "spec.parameterServers.template"),
    ),
    Rule(
        id="TopologyRequiredOrPreferred",
        path=f"{_PATH}.topology",
        scope=f"{_PATH}.topology",
        sentence="exactly one of `required` and `preferred` must be given",
        check=lambda spec: when(_not_one_topology(spec)),
        cel="has(self.required) != has(self.preferred)",
    ),
    Rule(
        id="TimeoutNeedsGateOrCoscheduling",
        path=f"{_PATH}.timeoutSeconds",
        scope=_PATH,
        sentence="`timeoutSeconds` is a setting of Gate and Coscheduling, not of {gang}: remove it or change"
        " `gangScheduler` (`startingDeadlineSeconds` bounds the start of every job)",
        check=lambda spec: when(
            _policy(spec).timeout_seconds is not None and _policy(spec).gang_scheduler not in _WITH_TIMEOUT,
            gang=_policy(spec).gang_scheduler.value,
        ),
        cel="!has(self.timeoutSeconds) || self.gangScheduler in ['Gate', 'Coscheduling']",
        values={"gang": "self.gangScheduler"},
        reads=(f"{_PATH}.timeoutSeconds", _GANG),
    ),
    Rule(
        id="QueueNeedsKueueOrVolcano",
        path=f"{_PATH}.queueName",
        scope=_PATH,
        sentence="`queueName` is a setting of Kueue and Volcano, not of {gang}: remove it or change `gangScheduler`",
        check=lambda spec: when(
            _policy(spec).queue_name is not None and _policy(spec).gang_scheduler not in _WITH_QUEUES,
            gang=_policy(spec).gang_scheduler.value,
        ),
        cel="!has(self.queueName) || self.gangScheduler in ['Kueue', 'Volcano']",
        values={"gang": "self.gangScheduler"},
        reads=(f"{_PATH}.queueName", _GANG),
    ),
    Rule(
        id="KueueNeedsQueue",
        path=f"{_PATH}.queueName",
        scope=_PATH,
        sentence="`gangScheduler` Kueue needs `queueName`: the name of a LocalQueue in the job's namespace",
        check=lambda spec: when(
            _policy(spec).gang_scheduler is GangScheduler.KUEUE and _policy(spec).queue_name is None
        ),
        cel="self.gangScheduler != 'Kueue' || has(self.queueName)",
        reads=(f"{_PATH}.queueName", _GANG),
    ),
)
