"""Objects that the API server takes and the operator cannot read cost nobody but their owner."""

import itertools
from collections.abc import Iterator

import pytest

from tests.integration.operator_process import JOBS, OperatorProcess, Raw, Team, eventually, running_operator
from tools.cluster.control_plane import ControlPlane

DEPTH = 1100
"""Parsers stop at 1,024 levels, the API server at 10,000."""


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


def test_a_job_that_cannot_be_read_is_named_and_left_alone(operator, victim, intruder):
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
    """Nobody bounds what clients say of the fields that they manage, on objects of any kind."""
    fields = '{"f:a":' * DEPTH + "{}" + "}" * DEPTH
    about = f'"apiVersion":"{job["apiVersion"]}","time":"2026-01-01T00:00:00Z","fieldsType":"FieldsV1"'
    return f'"managedFields":[{{"manager":"me","operation":"Update",{about},"fieldsV1":{fields}}}]'


def figure(operator: OperatorProcess, name: str, **labels: str) -> float:
    """The value of one of the operator's metrics."""
    wanted = f"disttrain_{name}" + "".join(f'{{{key}="{value}"}}' for key, value in labels.items())
    lines = operator.page("metrics").splitlines()
    return float(next(line for line in lines if line.startswith(wanted + " ")).rpartition(" ")[2])
