"""What of a job a run on this machine leaves out, in words."""

from typing import Any

import pytest

from disttrain.local.left_out import left_out
from disttrain_api.bounds import MAX_LISTED, MAX_MESSAGE_BYTES
from disttrain_api.pod_template import pod_template_schema
from tests.builders import a_job


def left_out_of(pod: dict[str, Any] | None = None, *, servers: dict[str, Any] | None = None, **workers: Any) -> str:
    if pod is not None:
        workers["template"] = {"spec": pod}
    spec: dict[str, Any] = {"workers": workers}
    if servers is not None:
        spec["parameterServers"] = servers
    return left_out(a_job(**spec))


def a_pod(**trainer: Any) -> dict[str, Any]:
    return {"containers": [{"name": "trainer", **trainer}]}


def test_a_plain_job_leaves_nothing_out() -> None:
    assert left_out_of() == ""
    assert left_out_of(command=["python3", "train.py"], args=["-v"], env=[{"name": "A", "value": "1"}]) == ""
    # What has its counterpart here, and what is of no weight without an image or a cluster.
    pod = a_pod(workingDir="src", ports=[{"containerPort": 80}], imagePullPolicy="Always")
    assert left_out_of(pod | {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "hostNetwork": True}) == ""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"secretRef": {"name": "s3-keys"}}, "the variables of Secret s3-keys (set them in your shell)"),
        ({"configMapRef": {"name": "paths"}}, "the variables of ConfigMap paths (set them in your shell)"),
        (
            {"prefix": "AWS_", "secretRef": {"name": "s3-keys"}},
            "the variables of Secret s3-keys, which begin with AWS_ (set them in your shell)",
        ),
    ],
)
def test_variables_of_objects_are_named(source: dict[str, Any], text: str) -> None:
    assert left_out_of(envFrom=[source]) == text
    assert left_out_of(a_pod(envFrom=[source])) == text


def test_values_from_elsewhere_are_named() -> None:
    entry = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    assert left_out_of(env=[{"name": "A", **entry}, {"name": "B", "value": "b"}, {"name": "C", **entry}]) == (
        "the values of A, C (set them in your shell)"
    )


def test_volumes_are_named_by_where_they_are_not() -> None:
    volumes = [{"name": name, "emptyDir": {}} for name in ("models", "disk", "of-no-container")]
    mounts = [{"name": "models", "mountPath": "/models"}, {"name": "models", "mountPath": "/m", "subPath": "m"}]
    pod = a_pod(volumeMounts=mounts, volumeDevices=[{"name": "disk", "devicePath": "/dev/xvda"}])
    assert left_out_of(pod | {"volumes": volumes}) == (
        "volume models at /models; volume models at /m; volume disk at /dev/xvda"
    )


def test_an_image_and_further_containers_are_named() -> None:
    pod = {"containers": [{"name": "shipper"}], "initContainers": [{"name": "fetch"}]}
    assert left_out_of(pod, image="me/train:1", command=["train"]) == (
        "image me/train:1 (programs and packages are those of this machine); init container fetch; container shipper"
    )


def test_each_further_field_of_a_pod_and_of_its_trainer_is_named() -> None:
    """None is passed over because nobody has thought of it: the fields come from the schema."""
    pod = pod_template_schema()["properties"]["spec"]["properties"]
    trainer = pod["containers"]["items"]["properties"]
    filled = {name: _filled(schema) for name, schema in trainer.items()}
    filled |= {"name": "trainer", "volumeMounts": [], "volumeDevices": []}
    text = left_out_of({name: _filled(schema) for name, schema in pod.items()} | {"containers": [filled]})
    assert (trainer.keys() | pod.keys()) - set(text.split("; ")[-1].split(", ")) == {
        # Said in words of their own.
        *("image", "env", "envFrom", "volumeMounts", "volumeDevices", "containers", "initContainers", "volumes"),
        # Done here, too.
        *("name", "command", "args", "workingDir", "terminationGracePeriodSeconds"),
        # A process of this machine has what they ask for.
        *("hostNetwork", "hostPID", "hostIPC", "hostUsers", "ports"),
        # About an image.
        *("imagePullPolicy", "imagePullSecrets"),
    }


def _filled(schema: dict[str, Any]) -> Any:
    """A value that asks for something; whether it makes sense is nobody's question here."""
    return {"array": [{"name": "x"}], "boolean": True, "integer": 1, "object": {"x": {}}}.get(schema["type"], "x")


def test_a_field_that_asks_for_nothing_is_not_named() -> None:
    assert left_out_of(a_pod(resources={}) | {"automountServiceAccountToken": False, "tolerations": []}) == ""


def test_what_the_servers_ask_for_is_named_too_and_what_both_ask_for_once() -> None:
    source = {"secretRef": {"name": "hub"}}
    servers = {"envFrom": [source], "template": {"spec": {"priorityClassName": "high"}}}
    assert left_out_of(envFrom=[source], servers=servers) == (
        "the variables of Secret hub (set them in your shell); priorityClassName"
    )


def test_what_a_cluster_does_with_the_job_comes_first() -> None:
    spec: dict[str, Any] = {
        "managedBy": "kueue.x-k8s.io/multikueue",
        "ttlSecondsAfterFinished": 60,
        "runPolicy": {"disruptionBudget": {"minAvailable": 1}},
        "workers": {"resources": {"limits": {"memory": "1Gi"}}},
    }
    assert left_out(a_job(**spec)) == "disruptionBudget; managedBy; ttlSecondsAfterFinished; resources"


def test_the_sentence_is_bounded() -> None:
    many = [{"secretRef": {"name": f"s{number}"}} for number in range(MAX_LISTED + 3)]
    assert left_out_of(envFrom=many).endswith("; and 3 more")
    long = [{"name": "V" * 200 + str(number), "valueFrom": {"fieldRef": {}}} for number in range(200)]
    assert len(left_out_of(env=long).encode()) <= MAX_MESSAGE_BYTES
