"""Expressions on the lines of programs: which are refused and why, and which numbers are read."""

from typing import Any

import pytest

from disttrain_api import problems
from disttrain_api.log_rules import compiled, number, whole
from tests.builders import a_manifest

STEP = "(?P<step>[0-9]+)"


def found(*patterns: str, **progress: Any) -> list[str]:
    rules = [{"pattern": pattern} for pattern in patterns]
    workers = {"image": "mine:1", "command": ["train"]}
    progress = {"totalSteps": 9, "logRules": rules} | progress
    given = {name: value for name, value in progress.items() if value is not None}
    spec = {"training": None, "workers": workers, "progress": given}
    return [str(problem) for problem in problems(a_manifest(**spec))]


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("[a", "missing ]"),
        ("(?=a)", "invalid perl operator"),
        (r"(a)\1", "invalid escape sequence"),
        ("(a{100}){100}", "invalid repetition size"),
        ("(?P<a>x)(?P<a>y)", "duplicate group name: a"),
        (r"\pL{400}", "pattern too large"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place_and_the_reason(pattern: str, why: str) -> None:
    (sentence,) = found(STEP, f"(?P<loss>.){pattern}")
    assert sentence.startswith("spec.progress.logRules: each `pattern` must be an RE2 expression")
    assert f"`logRules[1].pattern` is '(?P<loss>.){pattern}': {why}" in sentence


@pytest.mark.parametrize(
    ("patterns", "place", "why"),
    [
        ((), "spec.progress.logRules", "at least 1"),
        ((STEP,) * 9, "spec.progress.logRules", "at most 8"),
        ((STEP + "x" * 300,), "spec.progress.logRules[0].pattern", "at most 300"),
        (("",), "spec.progress.logRules[0].pattern", "may not be empty"),
    ],
)
def test_lists_and_patterns_have_bounds(patterns: tuple[str, ...], place: str, why: str) -> None:
    (sentence,) = found(*patterns)
    assert sentence.startswith(place)
    assert why in sentence


def test_the_last_step_comes_from_one_place() -> None:
    both = f"{STEP}/(?P<totalSteps>[0-9]+)"
    assert found(both, totalSteps=None) == []
    assert found(STEP) == []
    for sentences in (found(both), found(STEP, totalSteps=None)):
        (sentence,) = sentences
        assert "exactly one of `totalSteps` and a group `totalSteps`" in sentence


@pytest.mark.parametrize("text", ["1", "-1.5", "+.5", "3.", "1e-05", "2E+3", "-inf", "NaN", "Infinity"])
def test_what_programs_print_as_numbers_is_read(text: str) -> None:
    read = number(text)
    assert str(read) == str(float(text))


@pytest.mark.parametrize("text", ["", " 1", "1_0", "1,5", "0x1", "٣", "1e9999", "9" * 33, "e5", "1-", "nano", "--1"])
def test_what_is_no_number_is_passed_by(text: str) -> None:
    assert number(text) is None


def test_steps_are_digits() -> None:
    assert [whole(text) for text in ("120", "007", "-1", "1.0", "", "²", "٣", "9" * 33)] == [120, 7, *[None] * 6]


def test_time_is_linear_in_the_line() -> None:
    """Red with Python's own engine, which would not come back."""
    assert compiled("(x+x+)+y").search("x" * 4096) is None
