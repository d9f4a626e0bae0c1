"""What the record of a GPU needs of a Python that has been made by others, and what it keeps of a run that is ended."""

import json
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from benchmarks import gpu_gpt2, gpu_record, ranks
from benchmarks.gpu_table import Run
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


def test_a_run_that_stands_still_is_ended(monkeypatch, tmp_path):
    (tmp_path / "stands.py").write_text("import threading; threading.Event().wait()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ranks.RanksFailed, match="stands did not end within 0 s"):
        ranks.run(tmp_path, "stands", 1, seconds=0.0)


def test_named_figures_come_first_and_what_fails_costs_its_own_rows(monkeypatch):
    asked, found = [], []

    def rows(shape, micro, passes, peak, float8):
        asked.append((micro, passes, float8))
        if micro == 64:
            raise ranks.RanksFailed("it stood still")
        yield asked[-1]

    monkeypatch.setattr(gpu_gpt2, "rows", rows)
    monkeypatch.setattr(gpu_gpt2.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    with pytest.raises(SystemExit, match="1"):
        found.extend(gpu_gpt2.measure(quick=False))
    assert asked == [(32, 1, None), (64, 1, None), (32, 8, None), (32, 1, "Rowwise")]


def test_rows_are_written_down_while_others_are_measured(monkeypatch, tmp_path):
    row = {"name": "micro batch 32: throughput", "value": 9e5, "unit": "tokens/s", "reference": 9e5, "ratio": 1.0}
    written = []

    def watched(command, environment, seconds, look):
        file = Path(command[2].partition("=")[2])
        for text in ("", '{"rows": [', json.dumps({"rows": [row]}), json.dumps({"rows": [row, row]})):
            file.write_text(text)
            look()
            written.append(len(gpu_record.read(tmp_path).get("rows", [])))
        return 0

    monkeypatch.setattr(gpu_record, "watched", watched)
    run = Run("abc1234", "NVIDIA H200", "2.13.0", "2026-12-01")
    assert gpu_record.record_benchmark(tmp_path, tmp_path, run, 1.0, quick=False) == 0
    assert written == [0, 0, 1, 2]
