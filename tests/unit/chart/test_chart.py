"""What the chart renders, by the real helm: rights, flags, the key, the definition."""

from pathlib import Path

import pytest
import yaml

from disttrain_operator.preflight import (
    GATE_RIGHTS,
    HISTORY_RIGHTS,
    LEASE_RIGHTS,
    NETWORK_POLICY_RIGHTS,
    OPTIONAL_RIGHTS,
    RIGHTS,
)
from disttrain_operator.settings import read_settings
from tests.unit.chart.rendering import CHART, container, only, render, rights, run

DEFAULT_RIGHTS = {*RIGHTS, *HISTORY_RIGHTS}

# From cold, helm is built first, beside all that others build.
pytestmark = pytest.mark.timeout(1800)


def test_helm_lint_finds_nothing(helm: Path) -> None:
    done = run(helm, "lint", "--strict", str(CHART), "--kube-version", "1.34.0")
    assert done.returncode == 0, done.stdout


def test_every_flag_is_one_that_the_operator_knows(helm: Path) -> None:
    objects = render(
        helm,
        "watchNamespaces={team-a}",
        "trainer.image.repository=mine",
        "trainer.image.tag=v2",
        "podDefaults.shmSizeLimit=2Gi",
        "podDefaults.imagePullPolicy=Never",
        "podDefaults.userId=1234",
        "podDefaults.terminationGracePeriodSeconds=99",
        "podDefaults.nodeLostSeconds=7",
        "leaderElection.leaseDurationSeconds=15",
        "log.level=debug",
    )
    settings = read_settings(container(objects)["args"], {})
    assert settings.namespaces == ("team-a",)
    assert settings.trainer_image == "mine:v2"
    assert settings.json_logs
    assert settings.lease_duration_seconds == 15
    pods = settings.pods
    assert (pods.shm_size_limit, pods.image_pull_policy, pods.user_id) == ("2Gi", "Never", 1234)
    assert (pods.grace_seconds, pods.node_lost_seconds) == (99, 7)


def test_the_operator_meets_the_restricted_pod_security_standard(helm: Path) -> None:
    objects = render(helm)
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(objects)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"livenessProbe", "readinessProbe", "resources"} <= container(objects).keys()


def test_one_namespace_needs_no_right_in_any_other(helm: Path) -> None:
    """Red where the role is one of the cluster."""
    objects = render(helm, "watchNamespaces={team-a}")
    kinds = {document["kind"] for document in objects}
    assert {"Role", "RoleBinding"} <= kinds
    assert not kinds & {"ClusterRole", "ClusterRoleBinding"}
    of_rights = [document for document in objects if document["kind"] in ("Role", "RoleBinding")]
    where = {(document["metadata"]["namespace"], document["metadata"]["name"]) for document in of_rights}
    assert {name for namespace, name in where if namespace != "team-a"} == {"disttrain-job-token-key"}, "its own Secret"


def test_several_namespaces_have_a_role_and_a_lease_each(helm: Path) -> None:
    objects = render(helm, "watchNamespaces={team-b,team-a,team-b}")
    settings = read_settings(container(objects)["args"], {})
    assert settings.namespaces == settings.lease_namespaces == ("team-a", "team-b")
    assert settings.cluster_lease_namespace == "kube-system"
    for kind, name in (
        ("Role", "disttrain"),
        ("RoleBinding", "disttrain"),
        ("Role", "disttrain-lease"),
        ("RoleBinding", "disttrain-lease"),
        ("Lease", "disttrain-operator"),
    ):
        found = [document for document in objects if (document["kind"], document["metadata"]["name"]) == (kind, name)]
        assert sorted(document["metadata"]["namespace"] for document in found) == ["team-a", "team-b"]
        if name == "disttrain" and kind == "Role":
            assert all(rights(role) == DEFAULT_RIGHTS for role in found)
    assert not {"ClusterRole", "ClusterRoleBinding"} & {document["kind"] for document in objects}


def test_the_rights_are_exactly_those_that_the_operator_asks_for_when_it_starts(helm: Path) -> None:
    objects = render(helm)
    assert rights(only(objects, "ClusterRole", "disttrain")) == DEFAULT_RIGHTS
    assert rights(only(objects, "Role", "disttrain-lease")) == set(LEASE_RIGHTS)
    (rule,) = only(objects, "Role", "disttrain-lease")["rules"]
    assert rule["resourceNames"] == ["disttrain-operator"]


def test_the_roles_of_tenants_are_added_to_those_of_kubernetes(helm: Path) -> None:
    objects = render(helm)
    aggregated = "rbac.authorization.k8s.io/aggregate-to-"
    for name, into in (("viewer", {"view"}), ("editor", {"edit", "admin"})):
        role = only(objects, "ClusterRole", f"disttrain-{name}")
        labels = role["metadata"]["labels"]
        assert {label.removeprefix(aggregated) for label in labels if label.startswith(aggregated)} == into
        assert {group for rule in role["rules"] for group in rule["apiGroups"]} == {"disttrain.io"}


@pytest.mark.parametrize(
    ("values", "there"),
    [
        ([], True),
        (["rbac.aggregateClusterRoles=false"], False),
        (["rbac.create=false"], False),
        (["watchNamespaces={team-a}", "crds.enabled=true"], True),
        (["watchNamespaces={team-a}"], False),
    ],
)
def test_the_roles_of_tenants_come_with_the_definition(helm: Path, values: list[str], there: bool) -> None:
    names = {document["metadata"]["name"] for document in render(helm, *values) if document["kind"] == "ClusterRole"}
    assert names & {"disttrain-viewer", "disttrain-editor"} == (
        {"disttrain-viewer", "disttrain-editor"} if there else set()
    )


@pytest.mark.parametrize(
    ("values", "namespace"),
    [([], "kube-system"), (["leaderElection.namespace=admins"], "admins"), (["watchNamespaces={team-a}"], "team-a")],
)
def test_releases_that_serve_the_same_jobs_have_one_lease(helm: Path, values: list[str], namespace: str) -> None:
    """Helm refuses an object of another release, so a second release of the same jobs is not installed."""
    for release in ("system", "elsewhere"):
        objects = render(helm, *values, namespace=release)
        lease = only(objects, "Lease")
        assert (lease["metadata"]["name"], lease["metadata"]["namespace"]) == ("disttrain-operator", namespace)
        assert "spec" not in lease, "it is the operator's"
        assert only(objects, "Role", "disttrain-lease")["metadata"]["namespace"] == namespace
        settings = read_settings(container(objects)["args"], {})
        assert (settings.lease_namespaces, settings.lease_name) == ((namespace,), "disttrain-operator")
        assert settings.release == f"{release}/disttrain"


def test_a_release_of_one_namespace_looks_for_one_of_all_which_lets_it(helm: Path) -> None:
    settings = read_settings(container(render(helm, "watchNamespaces={team-a}"))["args"], {})
    assert settings.cluster_lease_namespace == "kube-system"
    objects = render(helm)
    assert read_settings(container(objects)["args"], {}).cluster_lease_namespace is None
    viewer = only(objects, "Role", "disttrain-lease-viewer")
    assert (viewer["metadata"]["namespace"], rights(viewer)) == (
        "kube-system",
        {("coordination.k8s.io", "leases", ("get",))},
    )
    assert viewer["rules"][0]["resourceNames"] == ["disttrain-operator"]
    (subject,) = only(objects, "RoleBinding", "disttrain-lease-viewer")["subjects"]
    assert subject["name"] == "system:serviceaccounts"


def test_replicas_elect_one_that_acts_and_keep_apart(helm: Path) -> None:
    objects = render(helm)
    deployment = only(objects, "Deployment")
    assert deployment["spec"]["replicas"] == 2
    settings = read_settings(container(objects)["args"], {})
    assert settings.leader_elect
    pod = deployment["spec"]["template"]["spec"]
    assert "podAntiAffinity" in pod["affinity"]
    assert {entry["tolerationSeconds"] for entry in pod["tolerations"]} == {30}
    own = render(helm, "affinity.nodeAffinity.a=b", "tolerations[0].key=mine")
    pod = only(own, "Deployment")["spec"]["template"]["spec"]
    assert pod["affinity"] == {"nodeAffinity": {"a": "b"}}
    assert [entry.get("key") for entry in pod["tolerations"]][-1] == "mine"


def test_nothing_is_rendered_by_chance(helm: Path) -> None:
    """Whoever applies what `helm template` says, again and again, changes nothing by that."""
    first, second = (run(helm, "template", "a", str(CHART), "--kube-version=1.34.0").stdout for _ in range(2))
    assert "kind: Deployment" in first
    assert first == second
    assert "Secret" not in {document["kind"] for document in render(helm)}


def test_the_operator_keeps_the_key_of_tokens_in_one_secret_that_it_may_read(helm: Path) -> None:
    """Red where the right to read Secrets names none."""
    objects = render(helm)
    settings = read_settings(container(objects)["args"], {})
    assert (settings.token_key_secret, settings.token_key_file) == ("system/disttrain-job-token-key", None)
    role = only(objects, "Role", "disttrain-job-token-key")
    assert role["metadata"]["namespace"] == "system"
    assert rights(role) == {("", "secrets", ("create",)), ("", "secrets", ("get",))}
    (get,) = [rule for rule in role["rules"] if rule["verbs"] == ["get"]]
    assert get["resourceNames"] == ["disttrain-job-token-key"]


def test_with_a_secret_of_ones_own_the_operator_may_read_none(helm: Path) -> None:
    """Red where the right to read the Secret is given all the same."""
    objects = render(helm, "tokenKey.existingSecret=mine", "tokenKey.existingSecretKey=token")
    settings = read_settings(container(objects)["args"], {})
    assert (settings.token_key_secret, settings.token_key_file) == (None, Path("/etc/disttrain-operator/key"))
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    (secret,) = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    assert (secret["secretName"], secret["items"]) == ("mine", [{"key": "token", "path": "key"}])
    assert "/etc/disttrain-operator" in {mount["mountPath"] for mount in container(objects)["volumeMounts"]}
    of_rights = [document for document in objects if document["kind"] in ("Role", "ClusterRole")]
    on_secrets = {right for role in of_rights for right in rights(role) if right[1] == "secrets"}
    assert on_secrets == {("", "secrets", ("create",))}


def test_metrics_are_found_by_their_service(helm: Path) -> None:
    values = ("enabled=true", "labels.release=prometheus", "interval=30s", "scrapeTimeout=5s", "annotations.a=b")
    changes = ("relabelings[0].targetLabel=cluster", "metricRelabelings[0].action=labeldrop")
    of_the_monitor = (f"metrics.serviceMonitor.{value}" for value in (*values, *changes))
    objects = render(helm, "metrics.serviceLabels.team=ml", *of_the_monitor)
    service = only(objects, "Service")
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    monitor = only(objects, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["endpoints"]
    assert (endpoint["interval"], endpoint["scrapeTimeout"]) == ("30s", "5s")
    assert endpoint["relabelings"] == [{"targetLabel": "cluster"}]
    assert endpoint["metricRelabelings"] == [{"action": "labeldrop"}]
    about = only(objects, "ServiceMonitor")["metadata"]
    assert (about["labels"]["release"], about["annotations"]) == ("prometheus", {"a": "b"})
    assert service["metadata"]["labels"]["team"] == "ml"
    kinds = {document["kind"] for document in render(helm, "metrics.service=false")}
    assert not kinds & {"Service", "ServiceMonitor"}


@pytest.mark.parametrize("scheduler", OPTIONAL_RIGHTS)
def test_a_scheduler_of_others_brings_its_rights_when_it_is_enabled(helm: Path, scheduler: str) -> None:
    objects = render(helm, f"scheduling.{scheduler}=true")
    assert rights(only(objects, "ClusterRole")) == {*DEFAULT_RIGHTS, OPTIONAL_RIGHTS[scheduler]}


def test_the_gate_brings_its_flag_and_its_rights_and_no_others(helm: Path) -> None:
    objects = render(helm, "gangGate.enabled=true")
    assert read_settings(container(objects)["args"], {}).gang_gate
    shorter = render(helm, "gangGate.enabled=true", "gangGate.holdSeconds=600")
    assert read_settings(container(shorter)["args"], {}).gate_hold_seconds == 600
    assert not read_settings(container(render(helm))["args"], {}).gang_gate
    assert rights(only(objects, "ClusterRole")) == {*DEFAULT_RIGHTS, *GATE_RIGHTS}


def test_network_policies_bring_their_flag_and_their_rights_and_no_others(helm: Path) -> None:
    objects = render(helm, "networkPolicy.perJob=true")
    assert read_settings(container(objects)["args"], {}).network_policies
    assert not read_settings(container(render(helm))["args"], {}).network_policies
    assert rights(only(objects, "ClusterRole")) == {*DEFAULT_RIGHTS, *NETWORK_POLICY_RIGHTS}
    assert rights(only(render(helm, "networkPolicy.perJob=true", "watchNamespaces={team-a}"), "Role")) == {
        *DEFAULT_RIGHTS,
        *NETWORK_POLICY_RIGHTS,
    }


def test_without_a_history_there_is_no_right_to_config_maps(helm: Path) -> None:
    objects = render(helm, "history.jobs=0")
    assert read_settings(container(objects)["args"], {}).history_jobs == 0
    assert read_settings(container(render(helm, "history.jobs=7"))["args"], {}).history_jobs == 7
    assert rights(only(objects, "ClusterRole")) == set(RIGHTS)
    named = [rule for rule in only(render(helm), "ClusterRole")["rules"] if rule["resources"] == ["configmaps"]]
    assert [rule.get("resourceNames") for rule in named] == [None, ["disttrain-history"]]


def test_the_gate_of_an_operator_of_one_namespace_is_refused(helm: Path) -> None:
    settings = ["--set", "gangGate.enabled=true", "--set", "watchNamespaces={team-a}"]
    done = run(helm, "template", "x", str(CHART), "--kube-version", "1.34.0", *settings)
    assert done.returncode != 0
    assert "needs an operator that serves all namespaces" in done.stderr


@pytest.mark.parametrize(("keep", "annotated"), [("true", True), ("false", False)])
def test_the_crd_is_kept_by_an_uninstall_if_values_ask_for_it(helm: Path, keep: str, annotated: bool) -> None:
    crd = only(render(helm, "crds.enabled=true", f"crds.keep={keep}"), "CustomResourceDefinition")
    policy = (crd["metadata"].get("annotations") or {}).get("helm.sh/resource-policy")
    assert (policy == "keep") is annotated


def test_the_crd_of_the_chart_is_the_generated_one(helm: Path) -> None:
    crd = only(render(helm, "crds.enabled=true", "crds.keep=false"), "CustomResourceDefinition")
    generated = yaml.safe_load((CHART.parents[1] / "crds" / "disttrain.io_disttrainingjobs.yaml").read_text())
    assert crd["spec"] == generated["spec"]


def test_without_crds_enabled_there_is_none(helm: Path) -> None:
    assert "CustomResourceDefinition" not in {document["kind"] for document in render(helm, "crds.enabled=false")}


@pytest.mark.parametrize(
    "setting",
    [
        "crds.kept=true",
        "networkPolicy.perPod=true",
        "image.pullPolicy=Sometimes",
        "podDefaults.userId=0",
        "log.level=loud",
        "leaderElection.leaseDurationSeconds=1",
    ],
)
def test_wrong_values_are_refused_by_name(helm: Path, setting: str) -> None:
    done = run(helm, "template", "x", str(CHART), "--kube-version", "1.34.0", "--set", setting)
    assert done.returncode != 0
    assert setting.split("=")[0].split(".")[-1] in done.stderr
