"""What holds for all tests: the gate's selection, limits and seeds, and what tests/run.py reads of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import suites
from tests.run import default_signals

default_signals()

# How long a case takes is the machine's affair.
hypothesis.settings.register_profile("complete", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "gate", deadline=None, print_blob=True, derandomize=True, database=None, max_examples=suites.examples(100)
)
hypothesis.settings.load_profile("gate" if suites.GATE else "complete")

HERE = Path(__file__).parent
ORDER = ("unit", "gpu", "browser", "local", "integration", "e2e")
"""A mistake that a unit test finds should not wait for a cluster."""
GATE_SECONDS = 300
"""Limit of a test of the gate with its fixtures."""
RESULTS = os.environ.get("DISTTRAIN_TEST_RESULTS")
_rows: set[str] = set()
"""Rows of the table of suites that found a test."""


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(HERE).parts[0] if HERE in item.path.parents else ""
    return ORDER.index(folder) if folder in ORDER else 0


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=_place)
    if not suites.GATE:
        return
    outside = []
    for item in items:
        rows = suites.rows_of(item.nodeid)
        _rows.update(rows)
        if not suites.in_gate(item.nodeid, rows):
            outside.append(item)
        # Before all other marks, which are the complete suite's.
        item.add_marker(pytest.mark.timeout(GATE_SECONDS), append=False)
    config.hook.pytest_deselected(items=outside)
    items[:] = [item for item in items if item not in set(outside)]


def _write(entry: dict[str, Any]) -> None:
    if RESULTS:
        with Path(RESULTS).open("a") as file:
            file.write(json.dumps(entry) + "\n")


def _write_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message if crash else str(report.longrepr).strip().splitlines()[-1]
        _write({"failed": report.nodeid, "why": f"{report.when or 'collect'}: {why.splitlines()[0][:400]}"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _write_failure(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _write_failure(report)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    kinds = ("passed", "failed", "error", "skipped", "deselected")
    counts = {kind: len(terminalreporter.stats[kind]) for kind in kinds if kind in terminalreporter.stats}
    _write({"counts": counts, "rows": sorted(_rows)})
