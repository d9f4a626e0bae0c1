"""The command line."""

import re
from pathlib import Path

import pytest
import yaml

from disttrain.errors import CommandError
from disttrain.local.folder import RunFolder, new_run
from disttrain.main import main
from disttrain_api import manifest
from tests.builders import a_manifest


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "arguments", [[], ["run"], ["run", "a.yaml", "--resume", "b"], ["train"], ["submit"], ["validate"]]
)
def test_a_wrong_command_line_is_usage(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capfd.readouterr().err.startswith("usage: disttrain")


@pytest.mark.parametrize("command", ["run", "submit", "validate", "collectives", "version"])
def test_every_command_has_a_help_that_fits_a_screen(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    lines = capfd.readouterr().out.splitlines()
    assert 3 < len(lines) < 24


def test_the_version_is_a_number(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.fullmatch(r"disttrain \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


def test_validate_answers_for_the_worst_of_its_files(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.yaml").write_text("kind: Pod\n")
    (folder / "good.yaml").write_text(yaml.safe_dump(a_manifest()))
    assert main(["validate", "good.yaml", "bad.yaml"]) == 1
    assert main(["validate", "good.yaml"]) == 0


def test_without_a_cluster_submit_says_so_in_one_line(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(a_manifest()))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert main(["submit", "job.yaml"]) == 1
    said = capfd.readouterr().err
    assert said.startswith("disttrain: no cluster to talk to: ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("claim", ["../other", "a/b", ".."])
def test_a_claim_does_not_lead_out_of_its_folder(folder: Path, claim: str) -> None:
    job = manifest.parse(yaml.safe_dump(a_manifest(storage={"claimName": "placeholder"})))
    storage = job.spec.storage
    assert storage is not None
    spec = job.spec.model_copy(update={"storage": storage.model_copy(update={"claim_name": claim})})
    with pytest.raises(CommandError, match="is not the name of a claim"):
        new_run(folder, job.model_copy(update={"spec": spec}))


def test_a_status_that_cannot_be_written_leaves_the_former_one(folder: Path) -> None:
    run = RunFolder(folder)
    run.write_job({"spec": 1})
    (folder / ".status.yaml.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        run.write_job({"spec": 2})
    assert (folder / "status.yaml").read_text() == "spec: 1\n"
