"""Whatever values the chart's schema allows, a real API server takes what they render."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.integration.operator_process import eventually
from tests.integration.pairwise import Row, pairwise
from tools.cluster.api import ApiClient
from tools.cluster.build import ensure
from tools.cluster.control_plane import ControlPlane
from tools.cluster.paths import REPOSITORY

CHART = REPOSITORY / "helm" / "disttrain"
NAMESPACE = "ops"
TERM = {"matchLabels": {"app": "x"}}
NODE = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
APART = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "zone", "labelSelector": TERM}]}

# For each value: the default, and what differs from it in kind.
CHOICES: dict[str, list[Any]] = {
    "nameOverride": ["", "trainer", "x" * 58],
    "fullnameOverride": ["", "trainer-system", "y" * 52],
    "image.repository": ["disttrain/operator", "registry.example:5000/a/b"],
    "image.tag": ["", "v1.2_x"],
    "image.digest": ["", "sha256:" + "0123456789abcdef" * 4],
    "image.pullPolicy": ["IfNotPresent", "Always", "Never"],
    "imagePullSecrets": [[], [{"name": "registry"}]],
    "replicas": [2, 1],
    "strategy": [{}, {"type": "Recreate", "rollingUpdate": None}, {"rollingUpdate": {"maxUnavailable": "50%"}}],
    "revisionHistoryLimit": [10, 0],
    "livenessProbe": [{}, {"initialDelaySeconds": 5, "timeoutSeconds": 2}],
    "readinessProbe": [{}, {"successThreshold": 2}],
    "apiPriority.enabled": [False, True],
    "apiPriority.nominalConcurrencyShares": [20, 1],
    "image.registry": ["", "registry.example:5000/mirror"],
    "trainer.image.registry": ["", "other.example"],
    "trainer.image.repository": ["disttrain/trainer", "a/b"],
    "trainer.image.tag": ["", "v1"],
    "trainer.image.digest": ["", "sha256:" + "0123456789abcdef" * 4],
    "trainerImage": ["", "registry.example/t@sha256:" + "0" * 64],
    "watchNamespaces": [[], ["team-a"], ["team-b", "team-a"]],
    "leaderElection.namespace": ["kube-system", "team-b"],
    "leaderElection.leaseDurationSeconds": [2, 120],
    "leaderElection.createLease": [True, False],
    "tokenKey.existingSecret": ["", "my.key"],
    "tokenKey.existingSecretKey": ["key", "token.txt"],
    "gangGate.enabled": [False, True],
    "gangGate.holdSeconds": [14400, 60],
    "history.jobs": [100, 0],
    "dashboard.enabled": [False, True],
    "dashboard.replicas": [1, 0],
    "dashboard.serviceAnnotations": [{}, {"example.org/e": "1"}],
    "dashboard.networkPolicy.enabled": [True, False],
    "dashboard.networkPolicy.from": [[], [{"namespaceSelector": TERM}]],
    "dashboard.resources": [{"requests": {"cpu": "50m"}}, {}],
    "networkPolicy.perJob": [False, True],
    "networkPolicy.operator.enabled": [False, True],
    "networkPolicy.operator.from": [[], [{"namespaceSelector": TERM}, {"ipBlock": {"cidr": "10.0.0.0/8"}}]],
    "podDefaults.imagePullSecrets": [[], [{"name": "registry"}]],
    "podDefaults.nodeSelector": [{}, {"pool": "gpu"}],
    "podDefaults.tolerations": [[], [{"key": "gpu", "operator": "Exists"}]],
    "podDefaults.priorityClassName": ["", "batch"],
    "podDefaults.labels": [{}, {"team": "ml"}],
    "podDefaults.annotations": [{}, {"example.org/a": "{{ b }}: # c"}],
    "podDefaults.env": [[], [{"name": "A", "value": "1"}, NODE]],
    "podDefaults.volumes": [[], [{"name": "ca", "configMap": {"name": "ca"}}]],
    "podDefaults.volumeMounts": [[], [{"name": "ca", "mountPath": "/etc/ca"}]],
    "podDefaults.imagePullPolicy": ["", "Always"],
    "podDefaults.shmSizeLimit": ["", "1.5Gi"],
    "podDefaults.userId": [65532, 1],
    "podDefaults.terminationGracePeriodSeconds": [60, 1],
    "podDefaults.nodeLostSeconds": [30, 0],
    # The definition itself is held to the API server by test_crd.py.
    "crds.enabled": [False],
    "crds.keep": [True, False],
    "scheduling.volcano": [False, True],
    "scheduling.coscheduling": [False, True],
    "serviceAccount.create": [True, False],
    "serviceAccount.name": ["", "mine"],
    "serviceAccount.annotations": [{}, {"example.org/role": "a:b/c"}],
    "rbac.create": [True, False],
    "rbac.aggregateClusterRoles": [True, False],
    "log.level": ["info", "debug"],
    "log.json": [True, False],
    "metrics.service": [True, False],
    "metrics.serviceLabels": [{}, {"team": "platform", "app.kubernetes.io/name": "not-mine"}],
    "metrics.serviceAnnotations": [{}, {"example.org/c": "1"}],
    "metrics.serviceMonitor.enabled": [False, True],
    "metrics.serviceMonitor.labels": [{}, {"release": "prometheus", "helm.sh/chart": "mine"}],
    "metrics.serviceMonitor.annotations": [{}, {"example.org/d": "1"}],
    "metrics.serviceMonitor.relabelings": [[], [{"targetLabel": "cluster", "replacement": "one"}]],
    "metrics.serviceMonitor.metricRelabelings": [[], [{"action": "labeldrop", "regex": "x"}]],
    "metrics.serviceMonitor.interval": ["", "1m30s"],
    "metrics.serviceMonitor.scrapeTimeout": ["", "10s"],
    "metrics.prometheusRule.enabled": [False, True],
    "metrics.prometheusRule.labels": [{}, {"release": "prometheus"}],
    "metrics.grafanaDashboard.enabled": [False, True],
    "metrics.grafanaDashboard.labels": [{"grafana_dashboard": "1"}, {}],
    "podDisruptionBudget.enabled": [True, False],
    "podDisruptionBudget.maxUnavailable": [1, 0, "50%"],
    "extraArgs": [[], ["--workers=128", "--replica-name=a: b # c"]],
    "extraEnv": [[], [{"name": "A", "value": "1"}, NODE]],
    "extraEnvFrom": [[], [{"secretRef": {"name": "mine", "optional": True}}]],
    "extraVolumes": [[], [{"name": "mine", "emptyDir": {}}]],
    # What is mounted must be there: the chart's own volume is.
    "extraVolumeMounts": [[], [{"name": "tmp", "mountPath": "/also-tmp"}]],
    "commonLabels": [{}, {"team": "platform", "app.kubernetes.io/name": "not-mine"}],
    "deploymentAnnotations": [{}, {"example.org/b": "true"}],
    "resources": [{"requests": {"cpu": "100m"}}, {}],
    "podSecurityContext": [{"runAsNonRoot": True}, {"runAsUser": None, "supplementalGroups": [7]}],
    "securityContext": [{"readOnlyRootFilesystem": True}, {"capabilities": None, "privileged": False}],
    "podLabels": [{}, {"team": "ml", "app.kubernetes.io/instance": "not-mine"}],
    "podAnnotations": [{}, {"example.org/a": "true"}],
    "nodeSelector": [{}, {"kubernetes.io/os": "linux"}],
    "tolerations": [[], [{"key": "a", "operator": "Exists"}]],
    "affinity": [{}, {"podAntiAffinity": APART}],
    "topologySpreadConstraints": [
        [],
        [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": TERM}],
    ],
    "priorityClassName": ["", "system-cluster-critical"],
    "global.imageRegistry": ["", "registry.example"],
}
PLURALS = {"NetworkPolicy": "networkpolicies", "ValidatingAdmissionPolicy": "validatingadmissionpolicies"}
MONITORING = {"ServiceMonitor": "servicemonitors", "PrometheusRule": "prometheusrules"}
"""Kinds of the Prometheus operator with their plurals."""


def allowed(row: Row) -> bool:
    """The one combination that the chart refuses (tests/unit/chart)."""
    return not (row.get("gangGate.enabled") and row.get("watchNamespaces"))


def leaves(schema: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Paths of all values that the schema knows, and whether one must say something."""
    for name, field in schema["properties"].items():
        if "properties" in field:
            yield from leaves(field, f"{prefix}{name}.")
        else:
            yield prefix + name, name in schema.get("required", ())


def nested(row: Row) -> dict[str, Any]:
    """Paths with dots as a tree of values."""
    tree: dict[str, Any] = {}
    for path, value in row.items():
        *above, last = path.split(".")
        place = tree
        for name in above:
            place = place.setdefault(name, {})
        place[last] = value
    return tree


def rendered(values: Path) -> list[dict[str, Any]]:
    """All objects of the chart with these values, and the pod of `helm test`."""
    command = [str(ensure(["helm"])["helm"]), "template", "one", str(CHART), "-n", NAMESPACE, "-f", str(values)]
    done = subprocess.run([*command, "--kube-version=1.34.0"], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stderr}\n{values.read_text()}"
    return [document for document in yaml.load_all(done.stdout, yaml.CSafeLoader) if document]


def path_of(thing: dict[str, Any]) -> str:
    """Where an object of this kind is created."""
    group, kind = thing["apiVersion"], thing["kind"]
    namespace = thing["metadata"].get("namespace")
    root = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    plural = PLURALS.get(kind, f"{kind.lower()}s")
    return f"{root}/namespaces/{namespace}/{plural}" if namespace else f"{root}/{plural}"


def install_monitoring(api: ApiClient, kind: str) -> None:
    """The kind alone, without its schema: the Prometheus operator's is not here."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    plural = MONITORING[kind]
    names = {"plural": plural, "singular": kind.lower(), "kind": kind}
    spec = {"group": "monitoring.coreos.com", "scope": "Namespaced", "names": names, "versions": [version]}
    definition = {"metadata": {"name": f"{plural}.monitoring.coreos.com"}, "spec": spec}
    api.ensure("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
    eventually(lambda: api.ask("GET", f"/apis/monitoring.coreos.com/v1/{plural}").status == 200)


def test_the_api_server_takes_what_any_two_values_render_together(api_server: ControlPlane, tmp_path: Path) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    kinds = dict(leaves(schema))
    assert kinds.keys() == CHOICES.keys(), "each value has its choices"
    # What null means is said by tests/unit/chart/test_null.py.
    choices = {path: values if kinds[path] else [*values, None] for path, values in CHOICES.items()}
    api = api_server.api
    for kind in MONITORING:
        install_monitoring(api, kind)
    for namespace in (NAMESPACE, "team-a", "team-b"):
        api.ensure("/api/v1/namespaces", {"metadata": {"name": namespace}})
    seen, refused = set[str](), list[str]()
    for number, row in enumerate(pairwise(choices, allowed)):
        values = tmp_path / f"{number}.json"
        values.write_text(json.dumps(nested(row)))
        for thing in rendered(values):
            text = json.dumps(thing, sort_keys=True)
            if text in seen:
                continue
            seen.add(text)
            answer = api.ask("POST", f"{path_of(thing)}?dryRun=All&fieldValidation=Strict", thing)
            if answer.status != 201:
                refused.append(f"{thing['kind']}: {answer.body.decode()[:400]}\n{text}")
    for plural in MONITORING.values():
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        api.ask("DELETE", f"{path}/{plural}.monitoring.coreos.com")
    assert refused == []
