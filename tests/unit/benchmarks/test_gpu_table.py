"""docs/gpu.md says of each path what its tests came to, and nothing of what did not run."""

import json
import re

import pytest

from benchmarks.gpu_table import NEVER, PATHS, Outcome, Run, outcomes, page, with_benchmark, with_tests
from tests.cluster.paths import REPOSITORY

RUN = Run("abc1234", "NVIDIA H200", "2.13.0", "2026-12-01")
LATER = Run("def5678", "NVIDIA H200", "2.13.0", "2026-12-09")


def case(name, path, inside=""):
    properties = f'<properties><property name="gpu_path" value="{path}"/></properties>'
    return f'<testcase name="{name}">{properties}{inside}</testcase>'


REPORT = f"""<testsuites><testsuite>
{case("learns", "BF16")}
{case("follows", "BF16")}
{case("restores", "NCCL", '<failure message="no">why</failure>')}
{case("fixture", "NCCL", '<error message="no">why</error>')}
{case("counts", "NCCL")}
{case("two", "NCCL between GPUs", '<skipped message="one GPU"/>')}
<testcase name="of no path"/>
</testsuite></testsuites>"""


def line_of(text, path):
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {path} |")]
    return found


def test_before_anything_ran_every_path_has_never_run():
    text = page({})
    assert [NEVER in line_of(text, path) for path in PATHS] == [True] * len(PATHS)
    assert "Never measured." in text


def test_outcomes_are_those_of_tests_that_ran():
    assert outcomes(REPORT) == {"BF16": Outcome(2, []), "NCCL": Outcome(1, ["restores", "fixture"])}


def test_a_line_says_where_its_path_has_run_or_what_fails():
    text = page(with_tests({}, outcomes(REPORT), RUN))
    assert "| run on a GPU at `abc1234` | 2 of 2; NVIDIA H200, torch 2.13.0, 2026-12-01 |" in line_of(text, "BF16")
    assert "| fails at `abc1234`: restores, fixture | 1 of 3;" in line_of(text, "NCCL")
    assert NEVER in line_of(text, "NCCL between GPUs")


def test_a_path_that_did_not_run_keeps_its_line():
    first = with_tests({}, outcomes(REPORT), RUN)
    text = page(with_tests(first, {"NCCL": Outcome(3, [])}, LATER))
    assert "run on a GPU at `abc1234`" in line_of(text, "BF16")
    assert "run on a GPU at `def5678`" in line_of(text, "NCCL")


def test_the_benchmarks_rows_are_shown_with_where_they_come_from():
    rows = [
        {"name": "micro batch 32: throughput", "value": 456789.1, "unit": "tokens/s", "reference": 5e5, "ratio": 0.91},
        {"name": "micro batch 32: highest memory", "value": 40.25, "unit": "GiB", "reference": 38.0, "ratio": 1.06},
    ]
    text = page(with_benchmark(with_tests({}, outcomes(REPORT), RUN), rows, LATER))
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
