"""What the chart leaves to those who install it: names, images, pods, their disruption, network and account."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_api.manifest import parse
from disttrain_operator.plan.template_defaults import FIELDS, read_template_defaults
from disttrain_operator.preflight import LEASE_RIGHTS
from disttrain_operator.settings import read_settings
from tests.unit.chart.rendering import CHART, container, only, render, rights, run
from tools.cluster.paths import IMAGE_TAG, REPOSITORY

# From cold, helm is built first, beside all that others build.
pytestmark = pytest.mark.timeout(1800)


def test_where_the_chart_makes_no_lease_the_operator_may(helm: Path) -> None:
    objects = render(helm, "leaderElection.createLease=false")
    assert "Lease" not in {document["kind"] for document in objects}
    role = only(objects, "Role", "disttrain-lease")
    assert rights(role) == {*LEASE_RIGHTS, ("coordination.k8s.io", "leases", ("create",))}


@pytest.mark.parametrize(
    ("values", "name", "label"),
    [
        ([], "disttrain", "disttrain-operator"),
        (["nameOverride=trainer"], "disttrain-trainer", "trainer"),
        (["fullnameOverride=mine"], "mine", "disttrain-operator"),
    ],
)
def test_names_can_be_chosen(helm: Path, values: list[str], name: str, label: str) -> None:
    objects = render(helm, *values)
    deployment = only(objects, "Deployment")
    assert deployment["metadata"]["name"] == name
    assert deployment["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == label
    assert deployment["spec"]["template"]["spec"]["serviceAccountName"] == name
    assert only(objects, "Service")["metadata"]["name"] == f"{name}-metrics"


DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("settings", "reference"),
    [
        ((), "disttrain/NAME:TAG"),
        (("IMAGE.tag=v2",), "disttrain/NAME:v2"),
        (("IMAGE.tag=v2", f"IMAGE.digest={DIGEST}"), f"disttrain/NAME@{DIGEST}"),
        (("IMAGE.repository=one.example/a",), "one.example/a:TAG"),
        (("IMAGE.registry=one.example:5000/b",), "one.example:5000/b/disttrain/NAME:TAG"),
        (("IMAGE.registry=one.example", "global.imageRegistry=all.example"), "all.example/disttrain/NAME:TAG"),
    ],
)
@pytest.mark.parametrize(("image", "name"), [("image", "operator"), ("trainer.image", "trainer")])
def test_both_images_are_named_by_the_same_values(helm, settings, reference, image, name):
    found = images(helm, *(setting.replace("IMAGE", image) for setting in settings))
    assert found[name] == reference.replace("NAME", name).replace("TAG", IMAGE_TAG)


def test_the_former_value_of_the_trainers_image_is_read_for_a_release(helm: Path) -> None:
    assert images(helm, "trainerImage=mine:2", "trainer.image.tag=other")["trainer"] == "mine:2"


def test_the_list_for_mirrors_has_both_images_as_they_are_rendered(helm: Path) -> None:
    page = (REPOSITORY / "docs" / "day-2.md").read_text()
    (command,) = [line for line in page.splitlines() if line.startswith("helm show chart")]
    path = f"{helm.parent}{os.pathsep}{os.environ['PATH']}"
    output = subprocess.check_output(command, shell=True, cwd=REPOSITORY, env={"PATH": path}, text=True)
    assert output.splitlines() == list(images(helm).values())


def images(helm: Path, *settings: str) -> dict[str, str]:
    operator = container(render(helm, *settings))
    return {"operator": operator["image"], "trainer": read_settings(operator["args"], {}).trainer_image}


def test_jobs_that_name_no_image_get_the_trainer_of_the_charts_version(helm: Path, tmp_path: Path) -> None:
    assert read_settings(container(render(helm))["args"], {}).trainer_image == f"disttrain/trainer:{IMAGE_TAG}"
    newer = shutil.copytree(CHART, tmp_path / "chart")
    about = newer / "Chart.yaml"
    about.write_text(about.read_text().replace(f"appVersion: {IMAGE_TAG}", "appVersion: 9.8.7"))
    done = run(helm, "template", "x", str(newer), "--kube-version=1.34.0", "-s=templates/deployment.yaml")
    assert "--trainer-image=disttrain/trainer:9.8.7\n" in done.stdout


def test_arguments_and_variables_of_ones_own_come_last(helm: Path) -> None:
    objects = render(
        helm, "extraArgs={--workers=128,--log-level=debug}", "extraEnv[0].name=DISTTRAIN_CONTEXT", "extraEnv[0].value=x"
    )
    settings = read_settings(container(objects)["args"], {})
    assert (settings.workers, settings.log_level) == (128, "DEBUG")
    assert container(objects)["env"] == [{"name": "DISTTRAIN_CONTEXT", "value": "x"}]


def test_users_and_groups_can_be_left_to_the_cluster(helm: Path) -> None:
    objects = render(helm, "podDefaults.userId=null")
    assert read_settings(container(objects)["args"], {}).pods.user_id is None
    assert read_settings(container(render(helm))["args"], {}).pods.user_id == 65532


def of_page(name: str, text: str, folder: Path) -> tuple[str, str]:
    """The values with these words on a page, as flags of helm."""
    page = (CHART.parents[1] / "docs" / name).read_text()
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if text in block]
    values = folder / "values.yaml"
    values.write_text(block)
    return "-f", str(values)


def test_with_the_pages_values_for_openshift_no_pod_has_a_user(helm: Path, tmp_path: Path) -> None:
    objects = render(helm, flags=of_page("installing.md", "userId: null", tmp_path))
    assert read_settings(container(objects)["args"], {}).pods.user_id is None
    for pod in (only(objects, "Deployment")["spec"]["template"]["spec"], only(objects, "Pod")["spec"]):
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert not {"runAsUser", "runAsGroup"} & pod["containers"][0]["securityContext"].keys()


def test_numbers_of_any_size_reach_the_operator_as_numbers(helm: Path, tmp_path: Path) -> None:
    """Helm reads numbers of a file as floating point, and writes those from a million on with an exponent."""
    values = tmp_path / "values.yaml"
    numbers = {"userId": 1000620001, "terminationGracePeriodSeconds": 2000000, "nodeLostSeconds": 1000001}
    values.write_text(yaml.safe_dump({"podDefaults": numbers, "crds": {"enabled": False}}))
    done = run(helm, "template", "x", str(CHART), "--kube-version", "1.34.0", "-f", str(values))
    assert done.returncode == 0, done.stderr
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    pods = read_settings(
        only(objects, "Deployment", "x-disttrain")["spec"]["template"]["spec"]["containers"][0]["args"], {}
    ).pods
    assert (pods.user_id, pods.grace_seconds, pods.node_lost_seconds) == (1000620001, 2000000, 1000001)


def test_what_is_laid_under_templates_is_a_file_of_the_operator_which_starts_anew_when_it_changes(helm, tmp_path):
    objects = render(helm, "podDefaults.labels.team=ml", "podDefaults.env[0].name=A", "podDefaults.env[0].value=b: #")
    content = only(objects, "ConfigMap")["data"]
    (flag,) = [argument for argument in container(objects)["args"] if argument.startswith("--pod-defaults-file=")]
    (mount,) = [mount for mount in container(objects)["volumeMounts"] if mount["name"] == "pod-defaults"]
    assert flag.partition("=")[2] == f"{mount['mountPath']}/{next(iter(content))}"
    volumes = only(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    assert {"name": "pod-defaults", "configMap": {"name": only(objects, "ConfigMap")["metadata"]["name"]}} in volumes
    file = tmp_path / "defaults"
    file.write_text(content["pod-defaults.json"])
    settings = read_settings([f"--pod-defaults-file={file}"], {})
    assert settings.pods.template == {"labels": {"team": "ml"}, "env": [{"name": "A", "value": "b: #"}]}
    of_the_page = only(render(helm, flags=of_page("operating.md", "podDefaults:", tmp_path)), "ConfigMap")["data"]
    assert read_template_defaults(of_the_page["pod-defaults.json"]).keys() == set(FIELDS)

    def annotations(*values: str) -> dict[str, str]:
        metadata: dict[str, dict[str, str]] = only(render(helm, *values), "Deployment")["spec"]["template"]["metadata"]
        return metadata.get("annotations", {})

    one, other = (annotations(f"podDefaults.labels.team={team}", "podAnnotations.a=b") for team in ("ml", "nlp"))
    assert one != other
    assert one["a"] == other["a"] == "b"
    assert annotations() == {}
    assert "ConfigMap" not in {document["kind"] for document in render(helm)}


def test_labels_of_ones_own_do_not_replace_those_that_select_the_pods(helm: Path) -> None:
    # The backslash is Helm's, for a dot within a name.
    objects = render(helm, "podLabels.team=ml", r"podLabels.app\.kubernetes\.io/instance=other", "podAnnotations.a=b")
    template = only(objects, "Deployment")["spec"]["template"]["metadata"]
    assert template["labels"]["team"] == "ml"
    assert template["labels"]["app.kubernetes.io/instance"] == "disttrain"
    assert template["annotations"] == {"a": "b"}


def test_labels_of_all_objects_are_added_to_the_charts_and_select_nothing(helm: Path) -> None:
    values = ("networkPolicy.operator.enabled=true", "metrics.serviceMonitor.enabled=true", "podDefaults.labels.a=b")
    plain = render(helm, *values)
    labelled = render(helm, *values, "commonLabels.cost=ml", r"commonLabels.app\.kubernetes\.io/name=other")
    for before, after in zip(plain, labelled, strict=True):
        assert after["metadata"]["labels"] == {**before["metadata"]["labels"], "cost": "ml"}
    template = only(labelled, "Deployment")["spec"]["template"]["metadata"]
    assert template["labels"]["cost"] == "ml"
    assert only(labelled, "Deployment")["spec"]["selector"] == only(plain, "Deployment")["spec"]["selector"]
    assert only(labelled, "Service")["spec"] == only(plain, "Service")["spec"]


def test_volumes_variables_and_annotations_of_ones_own_are_there_beside_the_charts(helm: Path) -> None:
    objects = render(
        helm,
        "extraVolumes[0].name=ca",
        "extraVolumes[0].configMap.name=private-ca",
        "extraVolumeMounts[0].name=ca",
        "extraVolumeMounts[0].mountPath=/etc/ca",
        "extraEnvFrom[0].secretRef.name=mine",
        "deploymentAnnotations.a=b",
        "metrics.serviceAnnotations.c=d",
    )
    deployment = only(objects, "Deployment")
    assert deployment["metadata"]["annotations"] == {"a": "b"}
    assert only(objects, "Service")["metadata"]["annotations"] == {"c": "d"}
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert [volume["name"] for volume in volumes] == ["tmp", "ca"]
    assert [mount["mountPath"] for mount in container(objects)["volumeMounts"]] == ["/tmp", "/etc/ca"]
    assert container(objects)["envFrom"] == [{"secretRef": {"name": "mine"}}]


def test_a_deployments_own_choices_are_left_to_those_who_install(helm: Path) -> None:
    def chosen(*settings: str) -> tuple[object, ...]:
        objects = render(helm, *settings)
        spec, probes = only(objects, "Deployment")["spec"], container(objects)
        times = (probes[probe] for probe in ("livenessProbe", "readinessProbe"))
        asked = ({name: value for name, value in probe.items() if name != "httpGet"} for probe in times)
        return spec.get("strategy"), spec.get("revisionHistoryLimit"), *asked

    rolling = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    live, ready = {"periodSeconds": 10, "failureThreshold": 6}, {"periodSeconds": 2, "failureThreshold": 3}
    assert chosen() == (rolling, 10, live, ready)
    assert chosen(
        *("strategy.type=Recreate", "strategy.rollingUpdate=null", "revisionHistoryLimit=0"),
        *("livenessProbe.timeoutSeconds=5", "readinessProbe.periodSeconds=9"),
    ) == ({"type": "Recreate"}, 0, {**live, "timeoutSeconds": 5}, {**ready, "periodSeconds": 9})


def test_the_operators_account_alone_has_the_share_of_the_api_server(helm: Path) -> None:
    assert not [one for one in render(helm) if one["apiVersion"].startswith("flowcontrol")]
    objects = render(helm, "apiPriority.enabled=true", "apiPriority.nominalConcurrencyShares=7")
    level = only(objects, "PriorityLevelConfiguration")
    assert level["spec"]["limited"]["nominalConcurrencyShares"] == 7
    flows = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "FlowSchema"}
    levels = {name: flow["priorityLevelConfiguration"]["name"] for name, flow in flows.items()}
    assert levels == {"disttrain": level["metadata"]["name"], "disttrain-leases": "leader-election"}
    account = {"name": container_account(objects), "namespace": "system"}
    for flow in flows.values():
        assert flow["rules"][0]["subjects"] == [{"kind": "ServiceAccount", "serviceAccount": account}]
    leases = flows["disttrain-leases"]
    assert leases["matchingPrecedence"] < flows["disttrain"]["matchingPrecedence"] < 9000
    wanted = {verb for _, resource, verbs in LEASE_RIGHTS for verb in verbs if resource == "leases"}
    assert wanted <= set(leases["rules"][0]["resourceRules"][0]["verbs"])


def container_account(objects: list[dict[str, Any]]) -> str:
    return str(only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"])


def test_a_drain_takes_one_replica_at_a_time(helm: Path) -> None:
    budget = only(render(helm), "PodDisruptionBudget")["spec"]
    assert (budget["maxUnavailable"], budget["unhealthyPodEvictionPolicy"]) == (1, "AlwaysAllow")
    half = only(render(helm, "podDisruptionBudget.maxUnavailable=50%"), "PodDisruptionBudget")["spec"]
    assert half["maxUnavailable"] == "50%"
    kinds = {document["kind"] for document in render(helm, "podDisruptionBudget.enabled=false")}
    assert "PodDisruptionBudget" not in kinds


def test_only_whom_the_values_name_and_the_test_reach_the_operator(helm: Path) -> None:
    objects = render(
        helm,
        "networkPolicy.operator.enabled=true",
        "networkPolicy.operator.from[0].namespaceSelector.matchLabels.name=monitoring",
    )
    policy = only(objects, "NetworkPolicy")["spec"]
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    of_test, of_monitoring = rule["from"]
    assert of_test["podSelector"]["matchLabels"].items() <= only(objects, "Pod")["metadata"]["labels"].items()
    assert of_monitoring == {"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}
    assert not of_test["podSelector"]["matchLabels"].items() <= labels.items()
    assert "NetworkPolicy" not in {document["kind"] for document in render(helm)}


def test_an_account_of_ones_own_gets_the_rights(helm: Path) -> None:
    objects = render(helm, "serviceAccount.create=false", "serviceAccount.name=mine")
    assert "ServiceAccount" not in {document["kind"] for document in objects}
    assert only(objects, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    bound = {
        subject["name"]
        for document in objects
        if document["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in document["subjects"]
        if subject["kind"] == "ServiceAccount"
    }
    assert bound == {"mine"}


def test_helm_test_asks_the_operators_service(helm: Path) -> None:
    objects = render(helm)
    pod = only(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (asking,) = pod["spec"]["containers"]
    assert asking["image"] == container(objects)["image"]
    assert asking["command"][-1] == "disttrain_operator.check_release"
    service = only(objects, "Service")
    host, port = asking["args"]
    assert host == f"{service['metadata']['name']}.system.svc"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert not service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert "Pod" not in {document["kind"] for document in render(helm, "metrics.service=false")}


def test_the_examples_that_the_chart_shows_are_jobs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (example,) = yaml.safe_load(chart["annotations"]["artifacthub.io/crdsExamples"])
    assert parse(yaml.safe_dump(example)).metadata.name == "ddp"
