"""What the scheduler or admission says of a pod leads to advice that fits it, and to no other."""

import pytest

from disttrain_operator.decide.observed import CreateProblem
from disttrain_operator.decide.refusals import NO_ROOM
from tests.unit.decide.test_startup import unplaced
from tests.unit.decide.world import a_world

NO_LABEL = "2 node(s) didn't match Pod's node affinity/selector"
NO_GPU = "2 Insufficient nvidia.com/gpu"
CONTROL_PLANE = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }"
NO_PREEMPTION = " preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling, Insufficient room."


@pytest.mark.parametrize(
    ("kinds", "advice"),
    [
        ([NO_GPU], [NO_ROOM]),
        ([CONTROL_PLANE, NO_GPU], [NO_ROOM]),
        ([NO_LABEL], ["nodeSelector"]),
        ([NO_LABEL, "1 node(s) had untolerated taint {gpu: true}"], ["nodeSelector", "toleration"]),
        ([CONTROL_PLANE], ["toleration"]),
        (["2 node(s) didn't match pod anti-affinity rules"], ["podAntiAffinity"]),
        (["2 node(s) didn't match pod topology spread constraints"], ["topologySpreadConstraints"]),
        (["2 node(s) were unschedulable"], ["uncordon"]),
        (["2 node(s) didn't have free ports for the requested pod ports"], ["other ports"]),
        (["something new"], [NO_ROOM]),
    ],
)
def test_what_the_scheduler_says_decides_what_to_do(kinds: list[str], advice: list[str]) -> None:
    message = f"0/3 nodes are available: {', '.join(kinds)}.{NO_PREEMPTION}"
    said = unplaced(a_world().settle(), 0, message).settle().condition("Running")[2]
    found = said.partition(NO_PREEMPTION.rstrip("."))[2]
    everything = [NO_ROOM, "nodeSelector", "toleration", "podAntiAffinity", "topologySpreadConstraints", "uncordon"]
    for text in advice:
        assert text in found
    related = {"podAntiAffinity", "topologySpreadConstraints"}
    wanted = set(advice) | (related if related & set(advice) else set())
    assert {text for text in everything if text in found} <= wanted


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ('violates PodSecurity "restricted:latest": privileged', "Pod Security level"),
        ('error looking up service account x/y: serviceaccount "y" not found', "kubectl get serviceaccounts"),
        ("no PriorityClass with name urgent was found", "kubectl get priorityclasses"),
        ('pod rejected: RuntimeClass "nvidia" not found', "kubectl get runtimeclasses"),
        ("maximum memory usage per Container is 1Gi, but limit is 2Gi", "LimitRange"),
        ('admission webhook "x.example.com" denied the request: no', "rule of that webhook"),
        ("for a reason of its own", "make the template follow the namespace's rules, or change them"),
    ],
)
def test_what_admission_says_decides_what_to_do(message: str, advice: str) -> None:
    world = a_world().settle()
    world.problems = [
        CreateProblem("Pod", "digits-3f9a1-worker-0-a1", 403, "Forbidden", f'pods "a" is forbidden: {message}')
    ]
    _, reason, text = world.settle().condition("Running")
    assert reason == "Forbidden"
    assert advice in text.partition(message)[2]
