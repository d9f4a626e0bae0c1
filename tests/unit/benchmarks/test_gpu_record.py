"""What the record of a GPU needs of a Python that has been made by others, and what it keeps of a run that is ended."""

import subprocess
import sys
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_record, ranks
from tools.cluster.paths import REPOSITORY

IMPORTS = """
import importlib, importlib.metadata, pathlib, sys
before = set(sys.modules)
for file in pathlib.Path("tests/gpu").glob("*.py"):
    importlib.import_module(f"tests.gpu.{file.stem}")
for module in ("tests.conftest", "disttrain_trainer.program", "benchmarks.gpu_gpt2", "benchmarks.gpu_plain_loop"):
    importlib.import_module(module)
packages = importlib.metadata.packages_distributions()
print(*{package for module in set(sys.modules) - before for package in packages.get(module.partition(".")[0], [])})
"""
OPTIONAL = {"pyzmq", "colorama", "pygments", "setuptools", "tqdm", "triton"}
"""The first has its tests skipped; the others are used where they are there."""


def closure(packages: set[str]) -> set[str]:
    """The packages, and those that they cannot be installed without."""
    found, waiting = set(), {package.lower() for package in packages}
    while waiting:
        package = waiting.pop()
        found.add(package.replace("_", "-"))
        needed = [Requirement(line) for line in requires(package) or []]
        plain = {one.name.lower() for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
        waiting |= {name for name in plain if name.replace("_", "-") not in found}
    return found


def test_all_that_its_tests_and_its_benchmark_import_is_named():
    command = [sys.executable, "-c", IMPORTS]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    imported = {package.lower().replace("_", "-") for package in printed.split()} - {"disttrain"}
    assert {"torch", "hypothesis"} <= imported
    assert imported - closure(set(gpu_record.NEEDED.values())) <= OPTIONAL


def test_what_is_missing_is_said_in_one_sentence(monkeypatch):
    monkeypatch.setattr(gpu_record, "NEEDED", {"json": "json", "no_such_module": "nothing", "nor_this": "none"})
    monkeypatch.setattr(sys, "argv", ["gpu_record.py"])
    with pytest.raises(SystemExit, match="lacks nothing, none: install them"):
        gpu_record.main()


def test_ranks_find_what_lies_on_the_path_of_who_starts_them(monkeypatch, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "only_there.py").write_text("import benchmarks.ranks; print('found')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "there"))
    assert ranks.run(tmp_path, "only_there", 1) == "found\n"
