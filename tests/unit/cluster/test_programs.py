import re
from pathlib import Path

import pytest

from tools.cluster import build
from tools.cluster.paths import TEMPLATES, TOOL_MODULES, binaries_folder
from tools.cluster.programs import ASSETS, PROGRAMS, required_version, to_build


def test_a_replaced_module_is_not_mistaken_for_a_required_one():
    with pytest.raises(ValueError, match="no version of k8s"):
        required_version("replace (\n\tk8s.io/api => k8s.io/api v0.34.4\n)\n", "k8s.io/api")


def test_coredns_is_built_with_the_plugins_that_the_corefile_names():
    named = re.findall(r"^    (\w+)", (TEMPLATES / "Corefile").read_text(), re.MULTILINE)
    main = (TOOL_MODULES / PROGRAMS["coredns"].folder / "coredns" / "main.go").read_text()
    assert re.findall(r"coredns/plugin/(\w+)", main) == sorted(named)


def test_only_what_is_asked_and_absent_is_built(tmp_path: Path):
    there = PROGRAMS["etcd"].binary(tmp_path)
    there.parent.mkdir(parents=True)
    there.touch()
    assert [program.name for program in to_build(ASSETS, tmp_path)] == ["kube-apiserver", "kubectl"]


def test_another_version_is_built_beside_the_old_one(tmp_path: Path):
    old = tmp_path / "etcd-v3.0.0" / "etcd"
    old.parent.mkdir(parents=True)
    old.touch()
    assert [program.name for program in to_build(["etcd"], tmp_path)] == ["etcd"]


def test_what_serves_one_run_is_built_quickly_and_lies_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    often = binaries_folder()
    monkeypatch.setenv("CI", "true")
    assert binaries_folder() != often
    quick, thorough = (build.flags(PROGRAMS["etcd"], quick=quick) for quick in (True, False))
    assert quick[1].split() == [*thorough[1].split(), "-l", "-d=ssa/prove/off"]
