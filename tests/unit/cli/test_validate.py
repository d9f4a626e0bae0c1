"""`disttrain validate`: what it prints, and what it answers to a shell."""

import io
import re
from pathlib import Path

import pytest
import yaml

from disttrain.main import main
from tests.builders import a_manifest
from tests.refusals.refusal import own_program, servers
from tests.unit.cli.fake_api import JOBS


def written(tmp_path: Path, *, name: str = "digits", **spec: object) -> str:
    """The path of a manifest."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(a_manifest(name, **spec)))
    return str(file)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "digits, 2 worker pods x 1 process, mesh dp2"),
        ({"workers": {"replicas": 1, "gpusPerPod": 8}}, "digits, 1 worker pod x 8 processes, 8 GPUs per pod, mesh dp8"),
        (servers(), "digits, 2 worker pods x 1 process, 1 parameter server, mesh dp2"),
    ],
)
def test_a_valid_manifest_is_summed_up(tmp_path, capfd, spec, message):
    path = written(tmp_path, **spec)
    assert main(["validate", path]) == 0
    assert capfd.readouterr() == (f"{path}: valid: {message}\n", "")


def test_every_problem_is_a_line_that_editors_can_jump_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(
        "apiVersion: disttrain.io/v1alpha1\n"
        "kind: DistTrainingJob\n"
        "metadata: {name: digits}\n"
        "spec:\n"
        "  workers: {replicas: 0}\n"
        "  parallelism: {tensorParallelDegre: 1}\n"
        "  training: {model: {name: mlp}, data: {name: digits}, steps: 1, microBatchSize: 1}\n"
    )
    assert main(["validate", str(file)]) == 1
    assert capfd.readouterr().err.splitlines() == [
        f"{file}: 2 problems",
        f"{file}:5: spec.workers.replicas: must be greater than or equal to 1, not 0",
        f"{file}:6: spec.parallelism.tensorParallelDegre: unknown field; did you mean `tensorParallelDegree`?",
    ]


class Stdin:
    """Standard input with this text."""

    def __init__(self, text: str) -> None:
        self.buffer = io.BytesIO(text.encode())


def fed(monkeypatch: pytest.MonkeyPatch, *documents: object) -> None:
    monkeypatch.setattr("sys.stdin", Stdin(yaml.safe_dump_all(documents)))


CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {"mode": "x"}}
PASSED_OVER = "skipped ConfigMap code: this command reads the DistTrainingJob alone"


def test_a_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    fed(monkeypatch, a_manifest())
    assert main(["validate", "-"]) == 0
    assert capfd.readouterr().out == "standard input: valid: digits, 2 worker pods x 1 process, mesh dp2\n"
    fed(monkeypatch, a_manifest(training={"stepz": 1}))
    assert main(["validate", "-"]) == 1
    problem = "spec.training.stepz: unknown field; did you mean `steps`?"
    assert re.fullmatch(f"standard input:[0-9]+: {re.escape(problem)}\n", capfd.readouterr().err)


@pytest.mark.parametrize("verb", ["validate", "plan", "submit", "run"])
def test_all_verbs_take_the_job_alone_from_wherever(verb, api, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    job = a_manifest("own", workers={"replicas": 1, "command": ["true"]}, training=None, suspend=True)
    fed(monkeypatch, CONFIG, job)
    assert main([verb, "-"]) == 0
    printed = capfd.readouterr()
    assert PASSED_OVER in printed.err
    assert "own" in printed.out + printed.err
    assert [*api.objects] == ([f"{JOBS.format('default')}/own"] if verb == "submit" else [])
    fed(monkeypatch, CONFIG)
    assert main([verb, "-"]) == 1
    assert ": kind: must be 'DistTrainingJob', not the string 'ConfigMap'" in capfd.readouterr().err


@pytest.mark.parametrize("verb", ["validate", "submit"])
def test_an_image_that_would_not_train_is_reported(verb, api, tmp_path, capfd):
    path = written(tmp_path, workers=own_program({"name": "pytorch", "image": "an/image:1"}))
    assert main([verb, path]) == 0
    message = f"{path}: spec.workers.template: the container `pytorch` runs beside the container `trainer`, "
    assert capfd.readouterr().err.startswith(message)


def test_a_missing_file_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "absent.yaml")
    assert main(["validate", path]) == 1
    assert capfd.readouterr() == ("", f"{path}: no such file\n")
