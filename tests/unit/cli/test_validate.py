"""`disttrain validate`: what it prints, and what it answers to a shell."""

from pathlib import Path

import pytest
import yaml

from disttrain.main import main
from tests.builders import a_manifest
from tests.refusals import servers


def written(tmp_path: Path, *, name: str = "digits", **spec: object) -> str:
    """The path of a manifest."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(a_manifest(name, **spec)))
    return str(file)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "digits, 2 worker pods x 1 process, mesh dp2"),
        ({"workers": {"replicas": 1, "gpusPerPod": 8}}, "digits, 1 worker pod x 8 processes, 8 GPUs per pod, mesh dp8"),
        (servers(), "digits, 2 worker pods x 1 process, 1 parameter server, mesh dp2"),
    ],
)
def test_a_valid_manifest_is_summed_up(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], spec: dict[str, object], said: str
) -> None:
    path = written(tmp_path, **spec)
    assert main(["validate", path]) == 0
    assert capfd.readouterr() == (f"{path}: valid: {said}\n", "")


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


def test_a_missing_file_is_one_sentence(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "absent.yaml")
    assert main(["validate", path]) == 1
    assert capfd.readouterr() == ("", f"{path}: no such file\n")
