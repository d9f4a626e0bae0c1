"""Jobs for the rules about those who place pods and those who drain nodes."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import SERVERS, WORKERS, Refusal, own_program, servers, untrained

SPREAD = {"maxSkew": 1, "topologyKey": "a/zone", "whenUnsatisfiable": "DoNotSchedule"}
BETWEEN_PODS = (
    "`gangScheduler` Gate ignores rules between pods: remove required podAffinity and"
    " podAntiAffinity and topologySpreadConstraints with DoNotSchedule from the templates, or make them preferences"
    " (`topology` puts pods together)"
)


def at_the_gate(**pod: Any) -> dict[str, Any]:
    """Changes that give the workers this pod spec, behind the gate."""
    return {
        "workers": own_program(**pod),
        "training": None,
        "runPolicy": {"schedulingPolicy": {"gangScheduler": "Gate"}},
    }


def apart(kind: str) -> dict[str, Any]:
    """Affinity that keeps pods apart, or would rather."""
    term: dict[str, Any] = {"topologyKey": "a/host", "labelSelector": {}}
    if kind == "preferred":
        term = {"weight": 1, "podAffinityTerm": term}
    return {"affinity": {"podAntiAffinity": {f"{kind}DuringSchedulingIgnoredDuringExecution": [term]}}}


RESTART_POD = {"rules": [{"action": "RestartPod"}]}

PLACEMENT_REFUSALS = (
    *(
        Refusal("GateSeesNodesOnly", "spec.runPolicy.schedulingPolicy.gangScheduler", BETWEEN_PODS, changes)
        for changes in (
            at_the_gate(**apart("required")),
            at_the_gate(topologySpreadConstraints=[SPREAD]),
            servers(topologySpreadConstraints=[SPREAD])
            | {"runPolicy": {"schedulingPolicy": {"gangScheduler": "Gate"}}},
        )
    ),
    Refusal(
        "DisruptionBudgetWithinPods",
        "spec.runPolicy.disruptionBudget.minAvailable",
        "`minAvailable` 4 must be at most the number of the job's pods, which is 3",
        servers() | {"runPolicy": {"disruptionBudget": {"minAvailable": 4}}},
    ),
    *(
        Refusal(
            f"{role}PriorityClass",
            f"{path}.spec.priorityClassName",
            "`priorityClassName` low in the template and high in `runPolicy.schedulingPolicy` differ: remove one of"
            " the two",
            changes | {"runPolicy": {"schedulingPolicy": {"priorityClassName": "high"}}},
        )
        for role, path, changes in (
            ("Workers", WORKERS, {"workers": own_program(priorityClassName="low")}),
            ("Servers", SERVERS, servers(priorityClassName="low")),
        )
    ),
    Refusal(
        "KueueRestartsNoSinglePods",
        "spec.runPolicy.failurePolicy",
        "RestartPod conflicts with `gangScheduler` Kueue, which keeps the name of a pod that ended until all"
        " of its group have ended: use RestartGang",
        {
            **untrained(own_program()),
            "runPolicy": {
                "schedulingPolicy": {"gangScheduler": "Kueue", "queueName": "mine"},
                "failurePolicy": RESTART_POD,
            },
        },
    ),
)

PLACEMENT_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "a budget of all pods": {"runPolicy": {"disruptionBudget": {"minAvailable": 2}}},
    "pods behind the gate that would rather be apart": at_the_gate(**apart("preferred")),
    "single pods made again by no queue": untrained(own_program(), runPolicy={"failurePolicy": RESTART_POD}),
}
