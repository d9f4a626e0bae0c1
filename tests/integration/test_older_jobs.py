"""Jobs that were stored under an earlier definition: what was meant to wait does not start by an upgrade."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_api.names import API_VERSION, KIND
from tests.integration.operator_process import CRD, JOBS, Raw, Team, a_spec, eventually, running_operator
from tools.cluster.control_plane import ControlPlane

CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/disttrainingjobs.disttrain.io"
FORMER: Raw = {
    "suspend": {"type": "boolean", "default": False},
    "managedBy": {"type": "string"},
    "schedulingPolicy": {
        "type": "object",
        "default": {"gang": "None"},
        "properties": {"gang": {"type": "string", "default": "None"}},
    },
}


def define(plane: ControlPlane, definition: Raw) -> None:
    """Write the definition; again where others wrote meanwhile, or the server took too long."""

    def is_written() -> bool:
        stored = plane.api.get(CRD_PATH)
        body = {**stored, "spec": {**stored["spec"], "versions": definition["spec"]["versions"]}}
        answer = plane.api.ask("PUT", CRD_PATH, body)
        assert answer.status in (200, 409, 504), answer
        return answer.status == 200

    eventually(is_written)


def former_definition() -> Raw:
    """The definition with these fields where they stood before, and without rules, which name them elsewhere."""
    definition: Raw = without_rules(yaml.safe_load(CRD.read_text()))
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["suspend"], spec["managedBy"], spec["runPolicy"]["default"]
    spec["runPolicy"]["properties"].update(FORMER)
    return definition


def without_rules(node: Any) -> Any:
    if isinstance(node, list):
        return [without_rules(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: without_rules(value) for key, value in node.items() if key != "x-kubernetes-validations"}


@pytest.fixture(scope="module")
def team(control_plane: ControlPlane) -> Team:
    """A namespace with jobs of the earlier version, under the definition as it is delivered."""
    made = Team(control_plane.api, "older")
    define(control_plane, former_definition())
    policies: Raw = {
        "plain": {"suspend": False},
        "suspended": {"suspend": True},
        "managed": {"managedBy": "example.com/other"},
        "gated": {"schedulingPolicy": {"gang": "Gate"}},
    }
    for name, policy in policies.items():
        eventually(partial(stored, made, name, policy))
    define(control_plane, yaml.safe_load(CRD.read_text()))
    eventually(lambda: "suspend" in job(made, "suspended")["spec"])
    return made


def stored(team: Team, name: str, policy: Raw) -> bool:
    """Whether the API server has stored the job with this policy: it may take a moment to go by a definition."""
    path = JOBS.format(team.namespace)
    manifest = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": a_spec(runPolicy=policy)}
    team.api.ask("POST", path, manifest)
    answer = team.api.ask("GET", f"{path}/{name}")
    kept = answer.json()["spec"]["runPolicy"] if answer.status == 200 else {}
    if "suspend" in kept and kept | policy == kept:
        return True
    team.api.ask("DELETE", f"{path}/{name}")
    return False


def job(team: Team, name: str) -> Raw:
    return team.api.get(f"{JOBS.format(team.namespace)}/{name}")


def test_what_waited_waits_under_the_new_definition(team: Team, control_plane: ControlPlane, tmp_path: Path) -> None:
    with running_operator(control_plane, tmp_path):
        eventually(lambda: len(team.pods()) == 2, team.pods)
        eventually(lambda: team.condition("Suspended", "suspended")["status"] == "True")
        assert team.condition("Suspended", "suspended")["message"] == (
            "spec.runPolicy.suspend is true; it is `spec.suspend` now: remove it to resume, as `disttrain resume` does"
        )
        eventually(lambda: team.condition("Running", "gated")["reason"] == "GateOff")
        assert "status" not in job(team, "managed"), "it is the other controller's"
        assert {pod["metadata"]["labels"]["disttrain.io/job-name"] for pod in team.pods()} == {"plain"}
        team.patch("suspended", suspend=False, runPolicy={"suspend": None})
        eventually(lambda: len(team.pods()) == 4, team.pods)


def test_no_new_job_has_a_field_of_an_earlier_version(team: Team) -> None:
    path = JOBS.format(team.namespace)
    plain = job(team, "plain")
    refused = team.api.ask("POST", path, {**plain, "metadata": {"name": "another"}})
    assert refused.status == 422
    assert "spec.runPolicy.suspend: Forbidden: it is `spec.suspend` now" in refused.json()["message"]
    assert team.api.ask("PATCH", f"{path}/plain", {"spec": {"runPolicy": {"maxRestarts": 7}}}).status == 200
