"""docs/gpu.md says of each path what its tests came to, and nothing of what did not run."""

import json
import re
from dataclasses import asdict

import pytest

from benchmarks.gpu_table import NEVER, PATHS, Outcome, Run, outcomes, page, selected, with_benchmark, with_tests
from tools.cluster.paths import REPOSITORY

RUN = Run("abc1234", "NVIDIA H200", "2.13.0", "2026-12-01")
LATER = Run("def5678", "NVIDIA H200", "2.13.0", "2026-12-09")


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
FOUND = outcomes(selected(LINES).values())


def line_of(text, path):
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {path} |")]
    return found


def test_before_anything_ran_every_path_has_never_run():
    text = page({})
    assert [NEVER in line_of(text, path) for path in PATHS] == [True] * len(PATHS)
    assert "Never measured." in text


def test_outcomes_are_those_of_tests_that_ran():
    assert {"BF16": Outcome(2), "NCCL": Outcome(1, ["restores", "fixture"])} == FOUND


def test_a_test_that_was_selected_and_has_no_outcome_did_not_end():
    results = [*LINES, *lines("hangs", "BF16"), *lines("waits", "NCCL"), '{"test": "half']
    found = outcomes(selected(results).values())
    assert found == {"BF16": Outcome(2, [], ["hangs"]), "NCCL": Outcome(1, ["restores", "fixture"], ["waits"])}
    text = page(with_tests({}, found, RUN))
    assert "| did not end at `abc1234`: hangs | 2 of 3;" in line_of(text, "BF16")
    assert "| fails at `abc1234`: restores, fixture; did not end at `abc1234`: waits | 1 of 4;" in line_of(text, "NCCL")


def test_why_a_test_failed_and_how_long_it_took_is_kept():
    tests = selected(LINES)
    assert (tests["restores"].why, tests["fixture"].why, tests["fixture"].seconds) == ("assert 1 == 2", "in leaving", 2)


def test_a_record_of_before_tests_could_be_unended_is_read():
    entry = {"passed": 2, "failed": []} | asdict(RUN)
    assert "| run on a GPU at `abc1234` | 2 of 2;" in line_of(page({"paths": {"BF16": entry}}), "BF16")


def test_a_line_says_where_its_path_has_run_or_what_fails():
    text = page(with_tests({}, FOUND, RUN))
    assert "| run on a GPU at `abc1234` | 2 of 2; NVIDIA H200, torch 2.13.0, 2026-12-01 |" in line_of(text, "BF16")
    assert "| fails at `abc1234`: restores, fixture | 1 of 3;" in line_of(text, "NCCL")
    assert NEVER in line_of(text, "NCCL between GPUs")


def test_a_path_that_did_not_run_keeps_its_line():
    first = with_tests({}, FOUND, RUN)
    text = page(with_tests(first, {"NCCL": Outcome(3, [])}, LATER))
    assert "run on a GPU at `abc1234`" in line_of(text, "BF16")
    assert "run on a GPU at `def5678`" in line_of(text, "NCCL")


def test_the_benchmarks_rows_are_shown_with_where_they_come_from():
    rows = [
        {"name": "micro batch 32: throughput", "value": 456789.1, "unit": "tokens/s", "reference": 5e5, "ratio": 0.91},
        {"name": "micro batch 32: highest memory", "value": 40.25, "unit": "GiB", "reference": 38.0, "ratio": 1.06},
    ]
    text = page(with_benchmark(with_tests({}, FOUND, RUN), rows, LATER))
    assert "At `def5678`, NVIDIA H200, torch 2.13.0, 2026-12-09." in text
    assert "| micro batch 32: throughput | 456,789 tokens/s | 500,000 tokens/s | 0.91 |" in text
    assert "| micro batch 32: highest memory | 40.2 GiB | 38 GiB | 1.06 |" in text
    assert "run on a GPU at `abc1234`" in line_of(text, "BF16")


def test_the_page_is_what_is_written_of_the_record():
    docs = REPOSITORY / "docs"
    assert (docs / "gpu.md").read_text() == page(json.loads((docs / "gpu.json").read_text()))


@pytest.mark.parametrize("path", PATHS)
def test_every_path_has_tests(path):
    sources = [file.read_text() for file in (REPOSITORY / "tests" / "gpu").glob("test_*.py")]
    assert any(re.search(f'"{re.escape(path)}"', source) for source in sources)
