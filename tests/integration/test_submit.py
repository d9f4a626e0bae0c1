"""`disttrain submit` and the Python client against a real API server. The test plays the operator."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from disttrain.client import Client
from disttrain.main import main
from disttrain_api.names import MAX_JOB_NAME_LENGTH
from tests.builders import NOW, a_manifest
from tests.integration.operator_process import JOBS, eventually
from tests.waiting import GENEROUS
from tools.cluster.control_plane import ControlPlane


@pytest.fixture
def namespace(control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig))
    name = f"team-{uuid.uuid4().hex[:8]}"
    control_plane.api.ensure("/api/v1/namespaces", {"metadata": {"name": name}})
    return name


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(a_manifest(workers={"replicas": 2})))
    return file


def a_status(condition: str, *, verdict: dict[str, Any] | None = None) -> dict[str, Any]:
    def entry(type_: str) -> dict[str, Any]:
        return {
            "type": type_,
            "status": "True",
            "reason": "Because",
            "message": "it is so",
            "lastTransitionTime": NOW.isoformat(),
            "observedGeneration": 1,
        }

    finished = [entry("Finished")] if condition in ("Complete", "Failed") else []
    phase = {"Complete": "Succeeded"}.get(condition, condition)
    attempt = {"number": 1, "startTime": NOW.isoformat(), **({"verdict": verdict} if verdict else {})}
    return {"phase": phase, "attempt": 1, "conditions": [entry(condition), *finished], "attempts": [attempt]}


def write_status(control_plane: ControlPlane, namespace: str, status: dict[str, Any]) -> None:
    place = f"{JOBS.format(namespace)}/digits"
    job = control_plane.api.ask("GET", place).json()
    assert control_plane.api.ask("PUT", f"{place}/status", {**job, "status": status}).status == 200


def submit(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "disttrain.main", "submit", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=GENEROUS)
    finally:
        process.kill()
    return process.returncode, out, err


def waiting(path: Path, namespace: str) -> tuple[subprocess.Popen[str], IO[str]]:
    """A `submit --wait` that has said that the job is Pending, and what it says from now on."""
    process = submit(path, "-n", namespace, "--wait")
    assert process.stdout.readline().startswith("dtj/digits created")
    assert process.stdout.readline() == "digits: Pending\n"
    return process, process.stdout


def test_a_manifest_is_sent_as_it_was_written(control_plane: ControlPlane, namespace: str, path: Path) -> None:
    code, out, err = ended(submit(path, "--namespace", namespace))
    assert (code, err) == (0, "")
    assert out == (
        f"dtj/digits created in namespace {namespace}\nfollow it with: disttrain logs -f digits -n {namespace}\n"
    )
    stored = control_plane.api.ask("GET", f"{JOBS.format(namespace)}/digits").json()
    assert stored["spec"]["workers"]["replicas"] == 2


def test_the_api_server_makes_the_name_where_it_may(control_plane: ControlPlane, namespace: str, path: Path) -> None:
    job = yaml.safe_load(path.read_text())
    job["metadata"] = {"generateName": "s" * (MAX_JOB_NAME_LENGTH - 5)}
    path.write_text(yaml.safe_dump_all([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}}, job]))
    code, out, err = ended(submit(path, "-n", namespace))
    assert (code, err) == (0, f"{path}: skipped ConfigMap code: this command reads the DistTrainingJob alone\n")
    (stored,) = control_plane.api.ask("GET", JOBS.format(namespace)).json()["items"]
    assert f"dtj/{stored['metadata']['name']} created" in out
    assert len(stored["metadata"]["name"]) == MAX_JOB_NAME_LENGTH


def test_a_job_that_exists_is_not_sent_twice(namespace: str, path: Path) -> None:
    assert ended(submit(path, "-n", namespace))[0] == 0
    code, _, err = ended(submit(path, "-n", namespace))
    assert code == 1
    assert err.startswith(f"disttrain: cannot create {namespace}/digits: ")
    assert "already exists" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("condition", "verdict", "code"),
    [
        ("Complete", None, 0),
        ("Failed", None, 1),
        ("Failed", {"reason": "DataNotFound", "message": "no file", "rank": 0, "exitCode": 81}, 81),
    ],
)
def test_wait_ends_as_the_job_does(control_plane, namespace, path, condition, verdict, code):
    process, out = waiting(path, namespace)
    write_status(control_plane, namespace, a_status("Running"))
    assert out.readline() == "digits: Running  attempt 1\n"
    write_status(control_plane, namespace, a_status(condition, verdict=verdict))
    returned, out, err = ended(process)
    assert returned == code
    assert out.startswith(f"digits: {'Succeeded' if code == 0 else 'Failed'}")
    assert err == ("" if code == 0 else "Failed: Because\n  it is so\n")


def test_wait_outlives_a_restart_of_the_api_server(control_plane: ControlPlane, namespace: str, path: Path) -> None:
    process, _ = waiting(path, namespace)
    control_plane.kill_api_server()
    control_plane.start_api_server()
    eventually(lambda: control_plane.api.ask("GET", JOBS.format(namespace)).status == 200)
    write_status(control_plane, namespace, a_status("Complete"))
    assert ended(process)[0] == 0


def test_wait_says_when_the_job_is_deleted(control_plane: ControlPlane, namespace: str, path: Path) -> None:
    process, _ = waiting(path, namespace)
    Client(namespace=namespace).delete("digits")
    code, _, err = ended(process)
    assert code == 1
    assert err == f"disttrain: {namespace}/digits was deleted\n"


def test_ctrl_c_while_waiting_leaves_the_job_alone(control_plane: ControlPlane, namespace: str, path: Path) -> None:
    process, _ = waiting(path, namespace)
    os.kill(process.pid, signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130
    assert "Traceback" not in err
    assert control_plane.api.ask("GET", f"{JOBS.format(namespace)}/digits").status == 200


def test_the_verbs_see_and_change_a_job(control_plane, namespace, path, capfd):
    where = ["-n", namespace]
    assert main(["submit", str(path), *where]) == 0
    write_status(control_plane, namespace, a_status("Running"))
    commands = ["list", "top", "get digits -o wide", "describe digits", "why digits", "events digits"]
    for verb in commands:
        capfd.readouterr()
        assert main([*verb.split(), *where]) == 0
        assert verb.startswith("events") or "digits" in capfd.readouterr().out
    assert main(["suspend", "digits", *where]) == 0
    stored = control_plane.api.ask("GET", f"{JOBS.format(namespace)}/digits").json()
    assert stored["spec"]["suspend"] is True
    assert main(["logs", "digits", *where]) == 1
    capfd.readouterr()
    assert main(["doctor", *where]) == 1
    out = capfd.readouterr().out
    assert "ok    definition: disttrain.io v1alpha1 is served, with the fields that this command knows" in out
    assert "BAD   operator: no Lease disttrain-operator" in out
    assert main(["delete", "digits", "--yes", *where]) == 0
    assert main(["get", "digits", *where]) == 1
    assert "not found" in capfd.readouterr().err
