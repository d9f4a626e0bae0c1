"""What a platform team lays under the templates of all jobs, and what is refused when the operator starts."""

import copy
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from disttrain_api.names import Role
from disttrain_operator.plan.desired import PodDefaults, default_environment, pod
from disttrain_operator.plan.template_defaults import FIELDS, MAX_BYTES, read_template_defaults, with_defaults
from tests.builders import a_job
from tests.unit.plan.test_pods import SITE, environment

NODE_IP = {"name": "NODE_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}
PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
CA = {"name": "ca", "configMap": {"name": "private-ca"}}
DEFAULTS: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "gpu", "zone": "a"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "priorityClassName": "batch",
    "labels": {"cost": "shared", "team": "nobody"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "env": [PROXY, NODE_IP],
    "volumes": [CA],
    "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
}
READ = read_template_defaults(yaml.safe_dump(DEFAULTS))
PLATFORM = replace(SITE, defaults=PodDefaults(template=READ))


def of_template(**template: Any) -> dict[str, Any]:
    return pod(a_job(workers={"template": template}), Role.WORKER, 0, 1, PLATFORM)


def names(entries: list[dict[str, Any]], key: str = "name") -> list[str]:
    return [entry[key] for entry in entries if not str(entry[key]).startswith(("disttrain-", "node.kubernetes.io"))]


def test_the_tests_have_all_fields() -> None:
    assert set(DEFAULTS) == set(FIELDS)


def test_pods_have_what_their_template_does_not_speak_of() -> None:
    job = a_job(parameterServers={}, parallelism={"dataParallel": {"mode": "ParameterServer"}})
    for role in (Role.WORKER, Role.PS):
        manifest = pod(job, role, 0, 1, PLATFORM)
        metadata, spec = manifest["metadata"], manifest["spec"]
        assert metadata["labels"].items() >= DEFAULTS["labels"].items()
        assert metadata["annotations"] == DEFAULTS["annotations"]
        for field in ("imagePullSecrets", "nodeSelector", "priorityClassName"):
            assert spec[field] == DEFAULTS[field]
        assert names(spec["tolerations"], "key") == ["nvidia.com/gpu"]
        assert names(spec["volumes"]) == ["ca"]
        (trainer,) = spec["containers"]
        assert PROXY in trainer["env"]
        assert NODE_IP in trainer["env"]
        assert DEFAULTS["volumeMounts"][0] in trainer["volumeMounts"]


def test_a_template_wins_by_key_and_by_name() -> None:
    own = {"name": "HTTPS_PROXY", "value": "http://own"}
    manifest = of_template(
        metadata={"labels": {"team": "vision"}},
        spec={
            "imagePullSecrets": [{"name": "own"}, {"name": "registry"}],
            "nodeSelector": {"zone": "b"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Equal", "value": "a100"}, {"key": "spot"}],
            "priorityClassName": "urgent",
            "volumes": [{"name": "ca", "secret": {"secretName": "own"}}],
            "containers": [
                {"name": "trainer", "env": [own], "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca/"}]},
                {"name": "sidecar", "image": "s", "env": [own]},
            ],
            "initContainers": [{"name": "fetch", "image": "f"}],
        },
    )
    assert manifest["metadata"]["labels"].items() >= {"team": "vision", "cost": "shared"}.items()
    spec = manifest["spec"]
    assert names(spec["imagePullSecrets"]) == ["own", "registry"]
    assert spec["nodeSelector"] == {"pool": "gpu", "zone": "b"}
    assert [entry.get("value") for entry in spec["tolerations"] if entry["key"] == "nvidia.com/gpu"] == ["a100"]
    assert spec["priorityClassName"] == "urgent"
    assert [volume for volume in spec["volumes"] if volume["name"] == "ca"] == [
        {"name": "ca", "secret": {"secretName": "own"}}
    ]
    trainer, sidecar = spec["containers"]
    assert [entry for entry in trainer["env"] if entry["name"] == "HTTPS_PROXY"] == [own]
    assert [mount["mountPath"] for mount in trainer["volumeMounts"] if mount["name"] == "ca"] == ["/etc/ca/"]
    assert sidecar["env"] == [NODE_IP, own], "those of the job come last: they may refer to the others"
    (fetch,) = spec["initContainers"]
    assert (fetch["env"], fetch["volumeMounts"]) == ([PROXY, NODE_IP], DEFAULTS["volumeMounts"])


def test_what_a_job_asks_its_scheduler_for_wins_too() -> None:
    job = a_job(runPolicy={"schedulingPolicy": {"priorityClassName": "urgent"}})
    assert pod(job, Role.WORKER, 0, 1, PLATFORM)["spec"]["priorityClassName"] == "urgent"


def test_variables_that_the_trainer_takes_from_a_secret_win() -> None:
    job = a_job(workers={"envFrom": [{"secretRef": {"name": "team"}}]})
    trainer = pod(job, Role.WORKER, 0, 1, PLATFORM)["spec"]["containers"][0]
    assert PROXY not in trainer["env"], "what stands in `env` wins over all of `envFrom`"
    secret = default_environment(job, PLATFORM)
    assert secret["stringData"]["HTTPS_PROXY"] == PROXY["value"]
    assert trainer["envFrom"][0] == {"secretRef": {"name": secret["metadata"]["name"]}}


def test_a_variable_of_the_platform_wins_over_the_operators_own() -> None:
    site = replace(SITE, defaults=PodDefaults(template={"env": [{"name": "HOME", "value": "/home/x"}]}))
    assert environment(pod(a_job(), Role.WORKER, 0, 1, site))["HOME"] == "/home/x"


def test_a_template_is_not_changed() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "env": []}], "nodeSelector": {"zone": "b"}}}
    before = copy.deepcopy(template)
    with_defaults(template, READ)
    assert template == before


def test_what_is_empty_is_left_out() -> None:
    assert read_template_defaults("{env: [], labels: {}, priorityClassName: ''}") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be one mapping of annotations, env, "),
        ("[a]", "must be one mapping"),
        ("a: b: c", "line 1"),
        ("x: " + "y" * MAX_BYTES, f"larger than {MAX_BYTES} bytes"),
        ("nodeSelectors: {}", "nodeSelectors: unknown field; did you mean `nodeSelector`?"),
        ("nodeSelector: {gpu: true}", "nodeSelector.gpu: "),
        ("tolerations: [{key: a, tolerationSeconds: soon}]", "tolerations[0].tolerationSeconds: "),
        ("imagePullSecrets: [registry]", "imagePullSecrets[0]: "),
        ("labels: {disttrain.io/role: x}", "labels: "),
        ("env: [{name: WORLD_SIZE, value: '7'}]", "env: "),
        ("env: [{value: '7'}]", "env[0].name: "),
        ("env: [{name: a b, value: '7'}]", "env[0].name: must hold letters, digits"),
        ("volumes: [{name: disttrain-shm, emptyDir: {}}]", "volumes: "),
        ("volumeMounts: [{name: ca, mountPath: /ca}]", "volumeMounts[0].name: no volume of `volumes` is called 'ca'"),
    ],
)
def test_what_is_wrong_is_reported_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_template_defaults(text)
