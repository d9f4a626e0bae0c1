"""Pods of a job whose command restarts in place, below an agent."""

from dataclasses import replace
from typing import Any

from disttrain_api.names import GANG_PORT, Env, Role
from disttrain_operator.plan.agent_around import AGENT_AROUND
from disttrain_operator.plan.desired import network_policy, pod
from disttrain_operator.plan.site import OperatorPods
from tests.builders import a_job, merge
from tests.unit.plan.test_pods import SITE, environment

IN_PLACE: dict[str, Any] = {
    "training": None,
    "workers": {"replicas": 2, "image": "mine:1", "command": ["torchrun"], "args": ["train.py"]},
    "runPolicy": {"restartStrategy": "InPlace", "maxRestarts": 7},
}
PROGRESS = {"progress": {"totalSteps": 9, "logRules": [{"pattern": "step (?P<step>[0-9]+)$"}]}}


def test_the_agent_stands_before_the_command_of_each_worker() -> None:
    pods = [pod(a_job(**IN_PLACE), Role.WORKER, index, 1, SITE) for index in (0, 1)]
    for planned in pods:
        trainer = planned["spec"]["containers"][0]
        assert (trainer["command"], trainer["args"]) == ([*AGENT_AROUND, "torchrun"], ["train.py"])
        found = environment(planned)
        assert (found[Env.RESTARTS_IN_PLACE], found[Env.GANG_PORT]) == ("7", str(GANG_PORT))
        assert (found[Env.AGENT_PORT], found[Env.TOKEN]) == ("29700", "/etc/disttrain/token")
        assert Env.CONFIG not in found
        assert "startupProbe" not in trainer, "an image without an agent would never pass it"
    recreated = pod(a_job(**merge(IN_PLACE, {"runPolicy": {"restartStrategy": "Recreate"}})), Role.WORKER, 0, 1, SITE)
    assert recreated["spec"]["containers"][0]["command"] == ["torchrun"], "its image may have no Python"
    found = environment(recreated)
    assert (found[Env.AGENT_PORT], found[Env.TOKEN]) == ("29700", "/etc/disttrain/token"), "for a program that reports"
    assert Env.GANG_PORT not in found


def test_the_kubelet_finds_no_reference_to_a_variable_in_the_agents_words() -> None:
    assert not any("$" in word for word in AGENT_AROUND)


def test_what_reads_progress_stands_between_the_agent_and_the_command() -> None:
    first, second = (pod(a_job(**IN_PLACE, **PROGRESS), Role.WORKER, index, 1, SITE) for index in (0, 1))
    reader = ["python3", "-P", "-m", "disttrain_session.program"]
    assert first["spec"]["containers"][0]["command"] == [*AGENT_AROUND, *reader, "torchrun"]
    assert second["spec"]["containers"][0]["command"] == [*AGENT_AROUND, "torchrun"]


def test_the_operators_pods_reach_the_agents() -> None:
    site = replace(SITE, network_policies=True, operator=OperatorPods("system", {"app": "disttrain"}))
    assert len(network_policy(a_job(**IN_PLACE), site)["spec"]["ingress"]) == 2
