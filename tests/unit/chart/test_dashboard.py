"""The dashboard of the chart: a pod of its own without rights, which nothing of the operator's selects."""

from pathlib import Path
from typing import Any

import pytest

from disttrain.dashboard.in_cluster import main
from tests.unit.chart.rendering import CHART, container, only, render, run

# From cold, helm is built first, beside all that others build.
pytestmark = pytest.mark.timeout(1800)

NAME = "disttrain-dashboard"
ON = "dashboard.enabled=true"


def pod_of(objects: list[dict[str, Any]], name: str = NAME) -> dict[str, Any]:
    found: dict[str, Any] = only(objects, "Deployment", name)["spec"]["template"]
    return found


def test_there_is_none_unless_the_values_ask_for_it(helm: Path) -> None:
    names = [document["metadata"]["name"] for document in render(helm)]
    assert not [name for name in names if "dashboard" in name]


@pytest.mark.parametrize("create", ["true", "false"])
def test_its_pod_has_no_right_and_no_token(helm: Path, create: str) -> None:
    objects = render(helm, ON, f"serviceAccount.create={create}", "networkPolicy.perJob=true", "gangGate.enabled=true")
    pod = pod_of(objects)["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert [volume.keys() - {"name"} for volume in pod["volumes"]] == [{"configMap"}]
    account = pod.get("serviceAccountName", "default")
    assert account == (NAME if create == "true" else "default")
    bindings = [document for document in objects if document["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    bound = {subject["name"] for binding in bindings for subject in binding["subjects"]}
    assert bindings
    assert NAME not in bound
    before = render(helm, "networkPolicy.perJob=true", "gangGate.enabled=true")
    roles = [[one for one in many if one["kind"].endswith("Role")] for many in (before, objects)]
    assert roles[0] == roles[1]
    context = pod["containers"][0]["securityContext"]
    assert (context["readOnlyRootFilesystem"], context["capabilities"]) == (True, {"drop": ["ALL"]})
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_nothing_of_the_operators_selects_its_pods(helm: Path) -> None:
    """Red where both have the same labels."""
    settings = ("networkPolicy.operator.enabled=true", "metrics.serviceMonitor.enabled=true", "commonLabels.a=b")
    objects = render(helm, ON, *settings)
    labels, operators = pod_of(objects)["metadata"]["labels"], pod_of(objects, "disttrain")["metadata"]["labels"]
    assert labels["a"] == "b"
    # Jobs' NetworkPolicies admit the operator's release to the agents by this one.
    assert labels["app.kubernetes.io/instance"] != operators["app.kubernetes.io/instance"]
    selectors = {}
    for document in objects:
        spec = document.get("spec", {})
        found = spec.get("podSelector", spec.get("selector")) or {}
        if document["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget", "Deployment"):
            selectors[document["kind"], document["metadata"]["name"]] = found.get("matchLabels", found)
    mine = {place for place, selector in selectors.items() if selector.items() <= labels.items()}
    theirs = {place for place, selector in selectors.items() if selector.items() <= operators.items()}
    assert mine == {("Service", NAME), ("NetworkPolicy", NAME), ("Deployment", NAME)}
    assert theirs == selectors.keys() - mine
    assert render(helm, *settings) == [document for document in objects if document["metadata"]["name"] != NAME]


def test_only_whom_the_values_name_reach_it(helm: Path) -> None:
    policy = only(render(helm, ON), "NetworkPolicy")["spec"]
    assert (policy["policyTypes"], policy["ingress"]) == (["Ingress"], [])
    objects = render(helm, ON, "dashboard.networkPolicy.from[0].namespaceSelector.matchLabels.name=ingress")
    (rule,) = only(objects, "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}]
    (port,) = pod_of(objects)["spec"]["containers"][0]["ports"]
    assert rule["ports"] == [{"port": port["containerPort"], "protocol": "TCP"}]
    service = only(objects, "Service", NAME)["spec"]
    assert [entry["targetPort"] for entry in service["ports"]] == [port["name"]]
    assert "NetworkPolicy" not in {one["kind"] for one in render(helm, ON, "dashboard.networkPolicy.enabled=false")}


def test_its_command_is_that_of_the_same_image_and_knows_its_flags(helm: Path, tmp_path: Path, capsys) -> None:
    objects = render(helm, ON, "watchNamespaces={team-b,team-a}", "image.tag=v2")
    (one,) = pod_of(objects)["spec"]["containers"]
    assert one["image"] == container(objects)["image"]
    assert one["command"] == ["python3", "-m", main.__module__]
    assert "--namespace=team-a,team-b" in one["args"]
    (mount,) = one["volumeMounts"]
    (volume,) = pod_of(objects)["spec"]["volumes"]
    (item,) = volume["configMap"]["items"]
    assert f"--ca-file={mount['mountPath']}/{item['path']}" in one["args"]
    # There is no such file here, which is the first thing that it looks for.
    assert main([*one["args"], "--server=https://127.0.0.1:1"]) == 1
    assert f"{mount['mountPath']}/{item['path']}" in capsys.readouterr().err


def test_its_names_and_labels_are_short_enough(helm: Path) -> None:
    for settings in ("fullnameOverride=" + "y" * 52, "nameOverride=" + "x" * 58):
        metadata = [document["metadata"] for document in render(helm, ON, settings)]
        mine = [found for found in metadata if found["name"].endswith("-dashboard")]
        assert len(mine) == 4
        for found in mine:
            assert all(len(word) <= 63 for word in (found["name"], *found["labels"].values()))


def test_values_of_the_wrong_kind_are_refused(helm: Path) -> None:
    for value in ('dashboard.enabled="yes"', "dashboard.replicas=-1", "dashboard.port=1", "dashboard.replicas=null"):
        done = run(helm, "template", "x", str(CHART), "--kube-version=1.34.0", f"--set-json={value}")
        assert done.returncode != 0, value
        assert value.partition("=")[0].split(".")[1] in done.stderr
