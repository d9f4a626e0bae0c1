"""What `pip install disttrain` alone can do, and what is said where an extra is missing."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from disttrain.main import main
from disttrain.verbs import SECTIONS, VERBS
from tools.cluster.paths import REPOSITORY

DDP = str(REPOSITORY / "examples" / "ddp.yaml")
ALONE = """
import sys
class Installed:
    @staticmethod
    def find_spec(name, path=None, target=None):
        top = name.partition(".")[0]
        if top in MISSING:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
sys.meta_path.insert(0, Installed)
from importlib import import_module
from disttrain.main import main
from disttrain.verbs import VERBS
import disttrain
disttrain.Client, disttrain.AsyncClient, disttrain.LocalClient
for verb in VERBS_OF_A_CLUSTER:
    code = main([verb, *(["digits"] if verb not in ("list", "history", "doctor", "top") else [])])
    assert code == 1, verb
"""


def closure(names: list[str]) -> set[str]:
    """Return these distributions with all that they need here."""
    found: set[str] = set()
    while names:
        name = canonicalize_name(names.pop())
        if name not in found:
            found.add(name)
            needed = [Requirement(line) for line in distribution(name).requires or []]
            names += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def modules_beyond_the_base() -> list[str]:
    """Return the top-level modules of what only extras bring."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    base = closure([Requirement(line).name for line in project["dependencies"]])
    extras = {"hf", "data", "fp8", "kubernetes", "local", "operator", "s3", "trainer"}
    lines = [line for extra in extras for line in project["optional-dependencies"][extra]]
    wanted = [Requirement(line).name for line in lines if not line.startswith("disttrain[")]
    tops = {"pyzmq": "zmq", "scikit-learn": "sklearn", "prometheus-client": "prometheus_client"}
    return sorted(tops.get(name, name) for name in closure(wanted) - base)


def test_the_verbs_of_a_cluster_need_no_extra(tmp_path: Path) -> None:
    """Red where one of them, or the client, imports what `pip install disttrain` does not bring."""
    missing = modules_beyond_the_base()
    assert {"torch", "numpy", "kopf", "matplotlib", "kubernetes"} <= set(missing)
    verbs = [verb for verb in SECTIONS["On a cluster"] if verb != "submit"] + ["doctor"]
    script = f"MISSING = {missing!r}\nVERBS_OF_A_CLUSTER = {verbs!r}\n{ALONE}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", "HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "none"), "LC_ALL": "C.UTF-8"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert len(re.findall("no cluster to talk to", done.stderr + done.stdout)) == len(verbs)


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", DDP],
        ["plan", DDP, "--layouts", "--bandwidth", "1G"],
        ["collectives"],
        ["export", "x", "y"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_what_trains_here_says_what_installs_it(arguments, monkeypatch, tmp_path, capfd) -> None:
    """Red where ranks are started that end with a traceback each."""
    for name in [
        name
        for name in sys.modules
        if name.partition(".")[0] == "torch" or name.startswith("disttrain_trainer.checkpoint")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 1
    said = capfd.readouterr().err.splitlines()
    assert said[-1].endswith("the package torch is not installed here: pip install 'disttrain[local]'")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_without_the_trainer_has_the_objects_and_the_least_memory(monkeypatch, capfd) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["plan", DDP]) == 0
    out = capfd.readouterr().out
    assert re.search(r"Pod +2 ", out)
    assert re.search(r"at least +1 MiB", out)
    assert "not known: the package torch is not installed here: pip install 'disttrain[local]'." in " ".join(
        out.split()
    )


def test_a_module_that_no_extra_brings_is_a_defect(monkeypatch) -> None:
    def broken() -> int:
        raise ModuleNotFoundError("No module named 'disttrain.none'", name="disttrain.none")

    monkeypatch.setattr("disttrain.commands.machine.version", broken)
    with pytest.raises(ModuleNotFoundError):
        main(["version"])
    assert "version" in VERBS
