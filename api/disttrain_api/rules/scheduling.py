"""Which settings of `schedulingPolicy` go together."""

from disttrain_api.rules.rule import Rule, when
from disttrain_api.scheduling import GangScheduler, SchedulingPolicy
from disttrain_api.spec import JobSpec

_PATH = "spec.runPolicy.schedulingPolicy"
_GANG = f"{_PATH}.gang"
_WITH_QUEUES = (GangScheduler.KUEUE, GangScheduler.VOLCANO)
_WITH_TIMEOUT = (GangScheduler.GATE, GangScheduler.COSCHEDULING)


def _policy(spec: JobSpec) -> SchedulingPolicy:
    return spec.run_policy.scheduling_policy


def _not_one_topology(spec: JobSpec) -> bool:
    topology = _policy(spec).topology
    return topology is not None and (topology.required is None) == (topology.preferred is None)


SCHEDULING_RULES = (
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
        sentence="`timeoutSeconds` is a setting of gang Gate and Coscheduling, not of {gang}: remove it or change"
        " `gang` (`startDeadlineSeconds` bounds the start of every job)",
        check=lambda spec: when(
            _policy(spec).timeout_seconds is not None and _policy(spec).gang not in _WITH_TIMEOUT,
            gang=_policy(spec).gang.value,
        ),
        cel="!has(self.timeoutSeconds) || self.gang in ['Gate', 'Coscheduling']",
        values={"gang": "self.gang"},
        reads=(f"{_PATH}.timeoutSeconds", _GANG),
    ),
    Rule(
        id="QueueNeedsKueueOrVolcano",
        path=f"{_PATH}.queueName",
        scope=_PATH,
        sentence="`queueName` is a setting of gang Kueue and Volcano, not of {gang}: remove it or change `gang`",
        check=lambda spec: when(
            _policy(spec).queue_name is not None and _policy(spec).gang not in _WITH_QUEUES,
            gang=_policy(spec).gang.value,
        ),
        cel="!has(self.queueName) || self.gang in ['Kueue', 'Volcano']",
        values={"gang": "self.gang"},
        reads=(f"{_PATH}.queueName", _GANG),
    ),
    Rule(
        id="KueueNeedsQueue",
        path=f"{_PATH}.queueName",
        scope=_PATH,
        sentence="gang Kueue needs `queueName`: the name of a LocalQueue in the job's namespace",
        check=lambda spec: when(_policy(spec).gang is GangScheduler.KUEUE and _policy(spec).queue_name is None),
        cel="self.gang != 'Kueue' || has(self.queueName)",
        reads=(f"{_PATH}.queueName", _GANG),
    ),
)
