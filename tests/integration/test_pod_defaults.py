"""What a platform team says in the chart's values reaches the pods of a job, as the API server stores them."""

from pathlib import Path

import yaml

from tests.integration.operator_process import Team, running_operator
from tests.integration.release import CHART, Release
from tools.cluster.api import ApiClient
from tools.cluster.control_plane import ControlPlane

PLATFORM = {
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"pool": "gpu"},
    # From a million on Helm writes numbers of YAML with an exponent.
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 2000000}],
    "priorityClassName": "platform-batch",
    "labels": {"cost-center": "cc-1"},
    "annotations": {"sidecar.istio.io/inject": "false"},
    "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "volumes": [{"name": "ca", "configMap": {"name": "private-ca", "optional": True}}],
    "volumeMounts": [{"name": "ca", "mountPath": "/etc/ca", "readOnly": True}],
}


def with_priority_class(api: ApiClient, name: str) -> None:
    api.ensure("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": 1000})


def test_pods_of_a_job_have_what_the_charts_values_say(control_plane: ControlPlane, tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump({"podDefaults": PLATFORM}))
    text = Release(control_plane, tmp_path, "one", "ops").succeed(
        "template", str(CHART), "--kube-version=1.34.0", f"-f={values}", "-s=templates/pod-defaults.yaml"
    )
    file = tmp_path / "pod-defaults.json"
    file.write_text(yaml.safe_load(text)["data"][file.name])
    with_priority_class(control_plane.api, "platform-batch")
    team = Team(control_plane.api, "pod-defaults")
    with running_operator(control_plane, tmp_path, f"--pod-defaults-file={file}"):
        own = {"metadata": {"labels": {"cost-center": "cc-2"}}, "spec": {"nodeSelector": {"zone": "a"}}}
        team.create(workers={"replicas": 2, "template": own})
        for pod in team.wait_for_pods(2):
            spec = pod["spec"]
            assert pod["metadata"]["labels"]["cost-center"] == "cc-2"
            assert pod["metadata"]["annotations"].items() >= PLATFORM["annotations"].items()
            assert spec["nodeSelector"] == {"pool": "gpu", "zone": "a"}
            assert spec["imagePullSecrets"] == PLATFORM["imagePullSecrets"]
            assert (spec["priorityClassName"], spec["priority"]) == ("platform-batch", 1000)
            (trainer,) = spec["containers"]
            for field, there in (
                ("tolerations", spec["tolerations"]),
                ("env", trainer["env"]),
                ("volumeMounts", trainer["volumeMounts"]),
            ):
                assert PLATFORM[field][0] in there
            (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "ca"]
            assert volume["configMap"]["name"] == "private-ca"
