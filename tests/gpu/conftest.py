"""One GPU. Each test says by `gpu_path` what it shows to run; `make gpu` writes that into docs/gpu.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu_table import PATHS

WHY_NOT = "torch.cuda.is_available() is false: no GPU here, or a torch without CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        # The first test of a module runs the worlds of all.
        item.add_marker(pytest.mark.timeout(900))
        paths = [path for mark in item.iter_markers("gpu_path") for path in mark.args]
        if unknown := set(paths) - PATHS.keys():
            raise pytest.UsageError(f"{item.nodeid}: gpu_path {unknown} is none of benchmarks/gpu_table.py's PATHS")
        # JUnit's report keeps properties, not markers.
        item.user_properties += [("gpu_path", path) for path in paths]
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=WHY_NOT))
