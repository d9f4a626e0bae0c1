"""One GPU. Each test says by `gpu_path` what it shows to run; `make gpu` writes that into docs/gpu.md.

Tests of the same `gpu_world` need the same worlds; those of others can run beside them, by pytest-xdist's loadgroup.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_table import OUTCOMES, PATHS
from tests.gpu.worlds import DEVICE

WHY_NOT = "torch.cuda.is_available() is false: no GPU here, or a torch without CUDA"
GPU_ONLY = "this is about a GPU, and DISTTRAIN_GPU_TESTS_DEVICE is cpu"
# A process of pytest-xdist, which has one that reports for all.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")


# Before pytest-xdist's, which looks for groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        # The first test of a world runs it for all; tests/gpu/worlds.py has the limits of worlds.
        item.add_marker(pytest.mark.timeout(420))
        world = next((mark.args[0] for mark in item.iter_markers("gpu_world")), "")
        item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{world}".replace(" ", "-")))
        paths = [path for mark in item.iter_markers("gpu_path") for path in mark.args]
        if unknown := set(paths) - PATHS.keys():
            raise pytest.UsageError(f"{item.nodeid}: gpu_path {unknown} is none of benchmarks/gpu_table.py's PATHS")
        # Reports keep properties, not markers.
        item.user_properties += [("gpu_path", path) for path in paths]
        if DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
        if DEVICE == "cpu" and item.get_closest_marker("gpu_only"):
            item.add_marker(pytest.mark.skip(reason=GPU_ONLY))
    if _WORKER in (None, "gw0"):
        for item in ours:
            if not _is_skipped(item):
                _write({"test": _name(item.nodeid), "paths": _paths(item)})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _WORKER is not None or (report.passed and report.when != "call"):
        return
    outcome = {"test": _name(report.nodeid), "paths": _paths(report), "outcome": report.outcome}
    _write({**outcome, "seconds": round(report.duration, 1), "why": report.longreprtext if report.failed else ""})


def _is_skipped(item: pytest.Item) -> bool:
    """Whether that is certain before it runs."""
    return any(mark.name == "skip" or mark.args[:1] == (True,) for mark in item.iter_markers() if "skip" in mark.name)


def _name(nodeid: str) -> str:
    """Without the file, and without the group that pytest-xdist has added."""
    return nodeid.partition("::")[2].rpartition("@")[0] or nodeid.partition("::")[2]


def _paths(of: pytest.Item | pytest.TestReport) -> list[str]:
    return [str(value) for name, value in of.user_properties if name == "gpu_path"]


def _write(entry: dict[str, Any]) -> None:
    if file := os.environ.get(OUTCOMES):
        with Path(file).open("a") as opened:
            opened.write(json.dumps(entry) + "\n")
