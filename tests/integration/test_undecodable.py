"""Objects that the API server takes and the operator cannot read cost nobody but their owner."""

import itertools
import json
from collections.abc import Iterator

import pytest

from tests.integration.operator_process import (
    JOBS,
    OperatorProcess,
    Raw,
    Team,
    a_spec,
    eventually,
    running_operator,
)
from tools.cluster.control_plane import ControlPlane

DEPTH = 1100
"""Parsers stop at 1,024 levels, the API server at 10,000."""
KINDS = {
    "DistTrainingJob": JOBS,
    "Pod": "/api/v1/namespaces/{}/pods",
    "Service": "/api/v1/namespaces/{}/services",
}
MANAGED = {"app.kubernetes.io/managed-by": "disttrain"}


@pytest.fixture(scope="module")
def operator(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorProcess]:
    with running_operator(control_plane, tmp_path_factory.mktemp("operator"), "--gang-gate") as started:
        yield started


_numbers = itertools.count()


@pytest.fixture
def victim(control_plane: ControlPlane) -> Team:
    return Team(control_plane.api, f"reader-{next(_numbers)}")


@pytest.fixture
def intruder(control_plane: ControlPlane) -> Team:
    return Team(control_plane.api, f"writer-{next(_numbers)}")


def deep_metadata(depth: int = DEPTH) -> str:
    """Nobody bounds what clients say of the fields that they manage, on objects of any kind."""
    fields = '{"f:a":' * depth + "{}" + "}" * depth
    return f'"managedFields":[{{"manager":"me","operation":"Update","fieldsType":"FieldsV1","fieldsV1":{fields}}}]'


def create_deep(team: Team, kind: str = "DistTrainingJob", name: str = "deep", depth: int = DEPTH) -> str:
    """Returns the path of an object of more levels than can be decoded, which could be the operator's otherwise."""
    spec: Raw = {
        "DistTrainingJob": a_spec(),
        "Pod": {"containers": [{"name": "trainer", "image": "registry.example/other:1"}]},
        "Service": {"ports": [{"port": 1}]},
    }[kind]
    version = "disttrain.io/v1alpha1" if kind == "DistTrainingJob" else "v1"
    manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": MANAGED}, "spec": spec}
    collection = KINDS[kind].format(team.namespace)
    answer = team.api.send("POST", collection, with_deep_metadata(manifest, depth))
    assert answer.status == 201, answer.body[:500]
    assert answer.body.count(b'{"f:a":') == depth
    return f"{collection}/{name}"


def with_deep_metadata(manifest: Raw, depth: int = DEPTH) -> bytes:
    version = f'"apiVersion":"{manifest["apiVersion"]}","time":"2026-01-01T00:00:00Z",'
    metadata = deep_metadata(depth).replace('"fieldsType"', version + '"fieldsType"')
    return json.dumps(manifest).replace('"metadata": {', '"metadata": {' + metadata + ",", 1).encode()


def trains(team: Team, name: str) -> None:
    """Returns when a new job has run and is done."""
    job = team.create(name)

    def pods() -> list[Raw]:
        uid = job["metadata"]["uid"]
        return [pod for pod in team.pods(1) if pod["metadata"]["labels"]["disttrain.io/job-uid"] == uid]

    eventually(lambda: len(pods()) == 2, lambda: team.status(name))
    team.run(pods())
    team.wait_for("Running", name=name)
    team.finish(pods())
    team.wait_for("Complete", name=name)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_of_more_levels_than_can_be_decoded_costs_others_nothing(
    operator: OperatorProcess, victim: Team, intruder: Team, kind: str
) -> None:
    create_deep(intruder, kind)
    trains(victim, "beside")
    operator.kill()
    operator.start()
    trains(victim, "after")
    assert operator.health("healthz") == 200


def test_a_job_that_cannot_be_read_is_named_and_left_alone(
    operator: OperatorProcess, victim: Team, intruder: Team
) -> None:
    """It ran, and its pods stay; the Event says why; nothing is listed again and again."""
    job = intruder.create("job")
    pods = intruder.wait_for_pods(2)
    intruder.run(pods)
    intruder.wait_for("Running")
    before, lists = intruder.status(), figure(operator, "informer_lists_total")
    for number in range(30):
        patch = f'{{"metadata":{{{deep_metadata_of(job)},"labels":{{"number":"{number}"}}}}}}'.encode()
        assert intruder.api.send("PATCH", f"{JOBS.format(intruder.namespace)}/job", patch).status == 200
    intruder.finish(pods[:1], code=1)
    eventually(lambda: "cannot be read" in operator.page("healthz"))
    assert operator.health("healthz") == 200
    event = eventually(lambda: [raw for raw in intruder.children("events") if raw["reason"] == "Unreadable"])[0]
    assert (event["type"], event["involvedObject"]["uid"]) == ("Warning", job["metadata"]["uid"])
    assert "nests too deep" in event["message"]
    assert f"{intruder.namespace}/job (version" in operator.log()
    trains(victim, "meanwhile")
    assert figure(operator, "unreadable_objects", kind="disttrainingjobs") >= 1
    assert figure(operator, "informer_lists_total") == lists
    assert [pod["metadata"]["uid"] for pod in intruder.pods()] == [pod["metadata"]["uid"] for pod in pods]

    plain = b'{"metadata":{"managedFields":[{}]}}'
    assert intruder.api.send("PATCH", f"{JOBS.format(intruder.namespace)}/job", plain).status == 200
    eventually(lambda: intruder.status().get("restarts") == 1, intruder.status)
    assert before["attempt"] == 1


def deep_metadata_of(job: Raw) -> str:
    version = f'"apiVersion":"{job["apiVersion"]}","time":"2026-01-01T00:00:00Z",'
    return deep_metadata().replace('"fieldsType"', version + '"fieldsType"')


def figure(operator: OperatorProcess, name: str, **labels: str) -> float:
    """The value of one of the operator's metrics."""
    wanted = f"disttrain_{name}" + "".join(f'{{{key}="{value}"}}' for key, value in labels.items())
    lines = operator.page("metrics").splitlines()
    return float(next(line for line in lines if line.startswith(wanted + " ")).rpartition(" ")[2])
