"""Rules for scheduling and for node drains."""

from collections.abc import Iterable

from disttrain_api.rules.pods import template_of
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.run_policy import FailureAction
from disttrain_api.scheduling import GangScheduler
from disttrain_api.spec import JobSpec

_SERVERS = given("self.?parameterServers.?replicas", "0")
_BUDGET = "self.runPolicy.disruptionBudget"
_PRIORITY = "self.runPolicy.schedulingPolicy.priorityClassName"


def _budget_beyond_pods(spec: JobSpec) -> Values | None:
    budget = spec.run_policy.disruption_budget
    available = budget.min_available if budget is not None else 0
    return when(available > spec.pods, available=available, pods=spec.pods)


def _priority_of(spec: JobSpec, path: str) -> str:
    pod = template_of(spec, path).get("spec")
    name = pod.get("priorityClassName") if isinstance(pod, dict) else None
    return name if isinstance(name, str) else ""


def _one_priority(role: str, path: str, template: str, has_role: str) -> Rule:
    """The template may name the job's PriorityClass, or none."""

    def check(spec: JobSpec) -> Values | None:
        wanted, found = spec.run_policy.scheduling_policy.priority_class_name, _priority_of(spec, path)
        return when(wanted is not None and found not in ("", wanted), found=found, wanted=wanted or "")

    own = f"{template}.spec.priorityClassName"
    absent = f"!has({_PRIORITY}) || {has_role}!has({template}.spec) || !has({own})"
    return Rule(
        id=f"{role}PriorityClass",
        path=f"{path}.spec.priorityClassName",
        sentence="`priorityClassName` {found} in the template and {wanted} in `runPolicy.schedulingPolicy` differ:"
        " remove one of the two",
        check=check,
        cel=f"{absent} || {own} in ['', {_PRIORITY}]",
        values={"found": own, "wanted": _PRIORITY},
        reads=(path, "spec.runPolicy.schedulingPolicy.priorityClassName"),
    )


def _restarts_single_pods(spec: JobSpec) -> bool:
    policy = spec.run_policy.failure_policy
    return policy is not None and any(rule.action is FailureAction.RESTART_POD for rule in policy.rules)


def _rules() -> Iterable[Rule]:
    yield Rule(
        id="DisruptionBudgetWithinPods",
        path="spec.runPolicy.disruptionBudget.minAvailable",
        sentence="`minAvailable` {available} must be at most the number of the job's pods, which is {pods}",
        check=_budget_beyond_pods,
        cel=f"!has({_BUDGET}) || {_BUDGET}.minAvailable <= self.workers.replicas + {_SERVERS}",
        values={"available": f"{_BUDGET}.minAvailable", "pods": f"self.workers.replicas + {_SERVERS}"},
        reads=(
            "spec.runPolicy.disruptionBudget.minAvailable",
            "spec.workers.replicas",
            "spec.parameterServers.replicas",
        ),
    )
    yield _one_priority("Workers", "spec.workers.template", "self.workers.template", "")
    yield _one_priority(
        "Servers",
        "spec.parameterServers.template",
        "self.parameterServers.template",
        "!has(self.parameterServers) || ",
    )
    yield Rule(
        id="KueueRestartsNoSinglePods",
        path="spec.runPolicy.failurePolicy",
        scope="spec.runPolicy",
        sentence="RestartPod conflicts with `gangScheduler` Kueue, which keeps the name of a pod that ended"
        " until all of its group have ended: use RestartGang",
        check=lambda spec: when(
            spec.run_policy.scheduling_policy.gang_scheduler is GangScheduler.KUEUE and _restarts_single_pods(spec)
        ),
        cel="self.schedulingPolicy.gangScheduler != 'Kueue' || !has(self.failurePolicy)"
        " || !self.failurePolicy.rules.exists(r, r.action == 'RestartPod')",
        reads=("spec.runPolicy.failurePolicy", "spec.runPolicy.schedulingPolicy.gangScheduler"),
    )


DISRUPTION_RULES = tuple(_rules())
