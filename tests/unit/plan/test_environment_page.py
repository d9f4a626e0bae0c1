"""docs/environment.md says what a pod's environment holds: no variable more, none less, under the right heading."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from disttrain_agent.environment import read_environment
from disttrain_api import manifest
from disttrain_api.names import GANG_PORT, HOST_PORTS, Env, Role
from disttrain_operator.plan.desired import GangPlan, Site, pod
from tests.builders import a_claim_template, a_job
from tools.cluster.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "environment.md").read_text()
SITE = Site(trainer_image="disttrain/trainer:test", token="t")
OWN: dict[str, Any] = {
    "training": None,
    "workers": {"template": {"spec": {"containers": [{"name": "trainer", "command": ["torchrun", "x.py"]}]}}},
}
SERVERS = {"parameterServers": {"replicas": 2, "template": OWN["workers"]["template"]}}
LOGGED: dict[str, Any] = {
    "training": None,
    "workers": {"command": ["train"]},
    "progress": {"totalSteps": 9, "logRules": [{"pattern": "(?P<step>.)"}]},
}
IN_PLACE = {"restartStrategy": "InPlace"}
TRAINED_BY_SERVERS = {"parameterServers": {}, "parallelism": {"dataParallel": {"mode": "ParameterServer"}}}


def page(heading: str) -> list[str]:
    """Variables of the table under a heading."""
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert found
    return list(found)


def environment(role: Role = Role.WORKER, *, replacement: int = 0, **spec: Any) -> dict[str, str]:
    planned = GangPlan(a_job(**spec), 1, SITE).pod(role, 0, replacement=replacement)
    (container, *_) = planned["spec"]["containers"]
    return {entry["name"]: entry.get("value", "from the node") for entry in container["env"]}


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            whole[key] = {**whole[key], **value} if isinstance(whole.get(key), dict) else value
    return whole


def ranks(number: int, each: int) -> dict[str, Any]:
    return {"workers": {"replicas": number, "processesPerPod": each}}


@pytest.mark.parametrize("program", [OWN, {}], ids=["own", "training"])
@pytest.mark.parametrize(("number", "each"), [(1, 1), (1, 4), (3, 1), (3, 4)])
def test_the_page_has_the_variables_of_workers(program: dict[str, Any], number: int, each: int) -> None:
    expected = {*page("Every pod"), *page("Workers")}
    if each == 1 and number > 1:
        expected |= set(page("Workers that are one rank of several"))
    expected |= {Env.TOKEN if program is OWN else Env.CONFIG}
    assert environment(**merged(program, ranks(number, each))).keys() == expected


@pytest.mark.parametrize(
    ("spec", "more"),
    [(merged(OWN, SERVERS), set()), (TRAINED_BY_SERVERS, {Env.CONFIG, Env.LOCAL_WORLD_SIZE})],
    ids=["own", "training"],
)
def test_the_page_has_the_variables_of_servers(spec: dict[str, Any], more: set[str]) -> None:
    assert environment(Role.PS, **spec).keys() == {*page("Every pod"), Env.PS_ADDRESSES} | more


def test_the_page_has_the_variables_that_a_job_asks_for() -> None:
    training = {"training": {"preflight": True}}
    asked = {"storage": a_claim_template(), "workers": {"replicas": 2}, "runPolicy": IN_PLACE}
    layout = {"parallelism": {"dataParallelShardDegree": 2}}
    found = environment(**training, **asked).keys() | environment(**merged(OWN, SERVERS, layout)).keys()
    found |= environment(**LOGGED).keys() | environment(**asked, replacement=3).keys()
    found |= environment(**merged(LOGGED, {"runPolicy": IN_PLACE})).keys()
    always = environment(**OWN).keys() - {Env.TOKEN}
    assert found - always == set(page("Where the job asks for it"))


def test_the_page_has_the_variables_of_ranks() -> None:
    pod_variables = environment(**ranks(2, 4), runPolicy=IN_PLACE)
    config = {name: value for name, value in pod_variables.items() if name != "PYTHONUNBUFFERED"}
    rank = replace(read_environment(config), memory="files").of_rank(0)
    laid_over = {name for name, value in rank.items() if config.get(name) != value}
    unchanged = {"LOCAL_WORLD_SIZE", "GROUP_RANK"}
    assert laid_over | unchanged == set(page("Ranks of the trainer"))


def test_the_limits_of_restarts_in_place_are_there_where_the_job_asks_for_them() -> None:
    limits = {"restartStrategy": "InPlace", "maxRestarts": 7, "restartBackoffSeconds": 5}
    found = environment(workers={"replicas": 1}, runPolicy=limits)
    assert (found[Env.RESTARTS_IN_PLACE], found[Env.RESTART_BACKOFF_SECONDS]) == ("7", "5")
    others = environment(workers={"replicas": 1}, runPolicy=limits | {"restartStrategy": "Recreate"})
    assert found.keys() - others.keys() == {Env.RESTARTS_IN_PLACE, Env.RESTART_BACKOFF_SECONDS}


def test_pods_that_restart_their_ranks_together_know_where_worker_0s_agent_leads_them() -> None:
    several = environment(workers={"replicas": 2}, runPolicy=IN_PLACE)
    assert several[Env.GANG_PORT] == str(GANG_PORT)
    there = {"replicas": 2, "template": {"spec": {"hostNetwork": True}}}
    job = a_job(workers=there, runPolicy=IN_PLACE)
    first, second = (pod(job, Role.WORKER, index, 1, SITE)["spec"]["containers"][0] for index in (0, 1))
    (port,) = (entry["hostPort"] for entry in first["ports"] if entry["name"] == "disttrain-gang")
    assert {"name": Env.GANG_PORT, "value": str(port)} in second["env"]
    assert port in HOST_PORTS
    assert len({entry["hostPort"] for entry in first["ports"]}) == 3, "each has a port of its own"
    for others in (ranks(1, 2) | {"runPolicy": IN_PLACE}, ranks(2, 1)):
        assert Env.GANG_PORT not in environment(**others)


def test_a_pod_in_place_of_a_lost_one_knows_which_it_is_and_no_other_pod_has_the_variable() -> None:
    asked = {"workers": {"replicas": 2}, "runPolicy": IN_PLACE}
    assert environment(**asked, replacement=3)[Env.REPLACEMENT] == "3"
    assert Env.REPLACEMENT not in environment(**asked)


def test_the_page_names_every_variable_of_the_contract_and_the_values_that_are_constant() -> None:
    names = {value for key, value in vars(Env).items() if not key.startswith("_")}
    assert names <= set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    found = environment(**OWN, storage=a_claim_template())
    for name in ("MASTER_PORT", "DISTTRAIN_SCRATCH", "DISTTRAIN_GRACE_SECONDS", "DISTTRAIN_STORAGE", "USER"):
        (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
        assert re.search(rf"(?<![\w/]){re.escape(found[name])}\b", row), row


def test_the_manifests_of_the_page_are_valid() -> None:
    found = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert [manifest.parse(text).spec.world_size for text in found] == [8, 4]


def test_the_page_is_found() -> None:
    for path in (REPOSITORY / "README.md", REPOSITORY / "docs" / "command-line.md"):
        assert "environment.md" in Path(path).read_text(), path
