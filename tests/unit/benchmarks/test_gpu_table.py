"""docs/gpu.md says of each path what its tests came to, and nothing of what did not run."""

import json
import re

import pytest

from benchmarks.gpu_table import PATHS, Outcome, Run, outcomes, page, selected, with_tests
from tools.cluster.paths import REPOSITORY

RUN = Run("abc1234", "NVIDIA H200", "2.13.0", "2026-12-01")


def lines(name, path, *results):
    """What tests/gpu writes of a test: that it is selected, and each of its outcomes."""
    entry = {"test": name, "paths": [path]}
    return [json.dumps(one) for one in (entry, *({**entry, "seconds": 1.0, "why": "", **each} for each in results))]


LINES = [
    *lines("learns", "BF16", {"outcome": "passed"}),
    *lines("follows", "BF16", {"outcome": "passed"}),
    *lines("restores", "NCCL", {"outcome": "failed", "why": "assert 1 == 2"}),
    *lines("fixture", "NCCL", {"outcome": "passed"}, {"outcome": "failed", "why": "in leaving"}),
    *lines("counts", "NCCL", {"outcome": "passed"}),
    *lines("two", "NCCL between GPUs", {"outcome": "skipped"}),
    json.dumps({"test": "of no path", "paths": [], "outcome": "passed", "seconds": 1.0, "why": ""}),
]


def line_of(text, path):
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {path} |")]
    return found


def test_a_test_that_was_selected_and_has_no_outcome_did_not_end():
    results = [*LINES, *lines("hangs", "BF16"), *lines("waits", "NCCL"), '{"test": "half']
    found = outcomes(selected(results).values())
    assert found == {"BF16": Outcome(2, [], ["hangs"]), "NCCL": Outcome(1, ["restores", "fixture"], ["waits"])}
    text = page(with_tests({}, found, RUN))
    assert "| did not end at `abc1234`: hangs | 2 of 3;" in line_of(text, "BF16")
    assert "| fails at `abc1234`: restores, fixture; did not end at `abc1234`: waits | 1 of 4;" in line_of(text, "NCCL")


def test_the_page_is_what_is_written_of_the_record():
    docs = REPOSITORY / "docs"
    assert (docs / "gpu.md").read_text() == page(json.loads((docs / "gpu.json").read_text()))


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_tests(path):
    sources = [file.read_text() for file in (REPOSITORY / "tests" / "gpu").glob("test_*.py")]
    assert any(re.search(f'"{re.escape(path)}"', source) for source in sources)
