import re
from pathlib import Path

from tools.cluster.paths import TEMPLATES, TOOL_MODULES
from tools.cluster.programs import ASSETS, PROGRAMS, to_build


def test_coredns_is_built_with_the_plugins_that_the_corefile_names():
    named = re.findall(r"^    (\w+)", (TEMPLATES / "Corefile").read_text(), re.MULTILINE)
    main = (TOOL_MODULES / PROGRAMS["coredns"].folder / "coredns" / "main.go").read_text()
    assert re.findall(r"coredns/plugin/(\w+)", main) == sorted(named)


def test_only_what_is_asked_and_absent_is_built(tmp_path: Path):
    there = PROGRAMS["etcd"].binary(tmp_path)
    there.parent.mkdir(parents=True)
    there.touch()
    assert [program.name for program in to_build(ASSETS, tmp_path)] == ["kube-apiserver", "kubectl"]
