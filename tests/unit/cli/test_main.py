"""The command line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from disttrain.errors import CommandError
from disttrain.local import machine
from disttrain.local.demand import Misfit
from disttrain.local.folder import RunFolder, new_run
from disttrain.main import main
from disttrain.output import drain
from disttrain.verbs import VERBS
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


@pytest.mark.parametrize("command", VERBS)
def test_every_command_has_a_help_that_fits_a_screen(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert 3 < len(lines) < 24


def test_the_help_lists_every_verb_and_loads_none(folder: Path) -> None:
    heavy = ["torch", "kubernetes", "pydantic", "rich", "yaml", "urllib3", "asyncio", "disttrain.commands"]
    code = (
        f"import sys\nfrom disttrain.main import main\nmain(['--help'])\nsys.exit(str(set(sys.modules) & {set(heavy)}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"
    listed = re.findall(r"^  ([a-z]+)  ", done.stdout, re.MULTILINE)
    assert listed == [*VERBS]


def test_the_package_loads_nothing_before_a_name_of_it_is_used() -> None:
    code = "import sys\nimport disttrain\nsys.exit(str([name for name in sys.modules if name.startswith('disttrain')]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "['disttrain']\n"


def test_as_kubectls_plugin_it_calls_itself_so(monkeypatch, capfd):
    monkeypatch.setattr("sys.argv", ["/usr/local/bin/kubectl-disttrain", "version", "--help"])
    assert main() == 0
    assert capfd.readouterr().out.startswith("Usage: kubectl disttrain version ")


def test_completion_names_the_verbs() -> None:
    asked = {"_DISTTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "disttrain va", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "disttrain.main"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["validate"]


def test_the_version_is_a_number(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.fullmatch(r"disttrain \d+\.\d+\.\d+\S*\n", capfd.readouterr().out)


def test_validate_answers_for_the_worst_of_its_files(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.yaml").write_text("kind: Pod\n")
    (folder / "good.yaml").write_text(yaml.safe_dump(a_manifest()))
    assert main(["validate", "good.yaml", "bad.yaml"]) == 1
    assert main(["validate", "good.yaml"]) == 0


@pytest.mark.parametrize(
    ("server", "sentence"), [(None, "no cluster to talk to: "), ("http://127.0.0.1:9", "the cluster does not answer")]
)
def test_without_a_cluster_submit_says_so_in_one_line(folder, capfd, monkeypatch, server, sentence):
    (folder / "job.yaml").write_text(yaml.safe_dump(a_manifest()))
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("KUBECONFIG", "config" if server else "")
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    clusters, users = [{"name": "c", "cluster": {"server": server}}], [{"name": "u", "user": {}}]
    config = {"current-context": "c", "contexts": [context], "clusters": clusters, "users": users}
    (folder / "config").write_text(yaml.safe_dump(config))
    assert main(["submit", "job.yaml"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("disttrain: ")
    assert sentence in line


@pytest.mark.parametrize("claim", ["../other", "a/b", ".."])
def test_a_claim_does_not_lead_out_of_its_folder(folder: Path, claim: str) -> None:
    job = manifest.parse(yaml.safe_dump(a_manifest(storage={"claimName": "placeholder"})))
    storage = job.spec.storage
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


@pytest.mark.parametrize("verb", ["run", "collectives"])
def test_a_job_that_is_resumed_and_a_check_of_collectives_need_room_too(folder, capfd, monkeypatch, verb):
    monkeypatch.setattr(machine, "memory_limit", lambda: 2**34)
    job = manifest.parse(yaml.safe_dump(a_manifest(workers={"replicas": 10_000})))
    resumed = ["--resume", str(new_run(folder, job)[0].path)]
    assert main([verb, *(resumed if verb == "run" else ["--ranks", "10000"])]) == 1
    assert "10,000 ranks in 10,000 pods need at least" in capfd.readouterr().err


def test_what_may_not_fit_is_started_where_nobody_can_be_asked(capfd: pytest.CaptureFixture[str]) -> None:
    machine._require_yes(Misfit("the job may not fit this machine: 17 cores", certain=False), False)
    drain()
    said = "disttrain: started although the job may not fit this machine: 17 cores\n"
    assert capfd.readouterr().err == said


def test_a_check_of_collectives_without_a_folder_ends_with_a_sentence(folder, capfd, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder / "none"))
        assert main(["collectives"]) == 1
    said = f"disttrain: cannot write to {folder}/none: No such file or directory; choose another place with TMPDIR\n"
    assert capfd.readouterr().err == said
