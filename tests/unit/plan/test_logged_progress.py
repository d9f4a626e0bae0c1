"""Pods of a job whose progress is read from its program's output."""

from dataclasses import replace
from typing import Any

from disttrain_api.log_rules import LoggedProgress
from disttrain_api.names import Env, Role
from disttrain_operator.plan.desired import network_policy, pod
from disttrain_operator.plan.site import OperatorPods
from tests.builders import a_job
from tests.unit.plan.test_pods import SITE, environment

LOGGED: dict[str, Any] = {
    "training": None,
    "workers": {"replicas": 2, "image": "mine:1", "command": ["torchrun", "$(A)"], "args": ["train.py"]},
    "progress": {"totalSteps": 9, "logRules": [{"pattern": "step (?P<step>[0-9]+)$"}, {"pattern": "$$(?P<cost>.)"}]},
}


def test_the_first_worker_of_a_program_that_is_read_starts_it_through_the_one_that_reads() -> None:
    job = a_job(**LOGGED)
    assert job.spec is not None
    first, second = (pod(job, Role.WORKER, index, 1, SITE) for index in (0, 1))
    trainer = first["spec"]["containers"][0]
    assert trainer["command"] == ["python3", "-P", "-m", "disttrain_session.program", "torchrun", "$(A)"]
    assert trainer["args"] == ["train.py"]
    found = environment(first)
    assert found[Env.AGENT_PORT] == "29700"
    assert "$" not in found[Env.PROGRESS], "the kubelet would read a reference to a variable"
    assert LoggedProgress.model_validate_json(found[Env.PROGRESS]) == job.spec.progress
    assert second["spec"]["containers"][0]["command"] == ["torchrun", "$(A)"]
    assert Env.PROGRESS not in environment(second)


def test_the_agent_of_a_program_that_is_read_has_a_port_of_the_jobs_own_on_the_network_of_its_node() -> None:
    workers = LOGGED["workers"] | {"template": {"spec": {"hostNetwork": True}}}
    first, second = (pod(a_job(**LOGGED | {"workers": workers}), Role.WORKER, index, 1, SITE) for index in (0, 1))
    ports = {entry["name"]: entry["hostPort"] for entry in first["spec"]["containers"][0]["ports"]}
    assert environment(first)[Env.AGENT_PORT] == str(ports["disttrain-agent"])
    assert "ports" not in second["spec"]["containers"][0]


def test_the_operators_pods_reach_a_program_that_is_read() -> None:
    site = replace(SITE, network_policies=True, operator=OperatorPods("system", {"app": "disttrain"}))
    policy = network_policy(a_job(**LOGGED), site)
    assert len(policy["spec"]["ingress"]) == 2
