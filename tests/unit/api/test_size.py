"""What is too deep, too much or too long is one violation, found without recursion and within bounded work."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api import ManifestError, parse
from disttrain_api.bounds import MAX_LISTED, MAX_MESSAGE_BYTES, cut, listed
from disttrain_api.size import CONFIG, MANIFEST, Limits, excess
from disttrain_api.validate import MAX_PROBLEMS, problems, read_job, read_spec
from tests.builders import a_manifest, merge

Raw = dict[str, Any]

PARTS = ("model", "data")


def deep(levels: int, inner: Any = 1) -> Any:
    """An object of so many levels, or list in object in list."""
    for level in range(levels):
        inner = {"a": inner} if level % 2 else [inner]
    return {"a": inner}


def with_config(part: str, config: Any) -> Raw:
    """A job whose model and data are the user's own."""
    own = {name: {"name": None, "entrypoint": "mine:make"} for name in PARTS}
    return a_manifest(training=merge(own, {part: {"config": config}}))


TOO_MUCH = {
    "deep": (deep(CONFIG.depth), "nested more than 6 levels deep, at `a"),
    "very-deep": (deep(5_000), "nested more than 6 levels deep"),
    "a-list-of-lists": ({"x": [[] for _ in range(350_000)]}, "holds more than 4096 values"),
    "keys": ({f"k{number}": 1 for number in range(20_000)}, "holds more than 4096 values"),
    "a-long-string": ({"x": "y" * 1_000_000}, "holds more than 131072 bytes"),
    "long-keys": ({"k" * 1000 + str(number): 1 for number in range(200)}, "holds more than 131072 bytes"),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("config", "sentence"), TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_config_beyond_its_bounds_is_one_problem_at_its_field(part: str, config: Any, sentence: str) -> None:
    """Red without the bound on levels, that on values, or that on bytes, and where a problem of the whole job is
    reported besides."""
    (found,) = problems(with_config(part, config))
    assert found.path == f"spec.training.{part}.config"
    assert sentence in found.message
    assert len(str(found)) < 300


@pytest.mark.parametrize("part", PARTS)
def test_a_config_at_its_bounds_is_read(part: str) -> None:
    config = {
        "deep": deep(CONFIG.depth - 2),
        "wide": list(range(CONFIG.values - 10)),
        "long": "x" * 90_000,
        "none": None,
    }
    job, found = read_job(with_config(part, config))
    assert found == []
    assert job.spec.training is not None
    assert getattr(job.spec.training, part).config == config


def test_empty_objects_and_lists_do_not_count_as_a_level() -> None:
    assert problems(with_config("model", deep(CONFIG.depth - 1, inner={}))) == []
    assert problems(with_config("model", deep(CONFIG.depth - 1, inner=[]))) == []


@pytest.mark.parametrize(
    "change",
    [
        {"workers": deep(5_000)},
        {"workers": {"template": deep(200)}},
        {"surprise": deep(200_000)},
        {"workers": {"template": {"metadata": {"annotations": {f"k{number}": "" for number in range(60_000)}}}}},
        {"workers": {"template": {"metadata": {"annotations": {"k": "x" * 2_000_000}}}}},
    ],
)
def test_any_part_beyond_the_bounds_of_a_job_is_one_problem(change: Raw) -> None:
    spec, found = read_spec(a_manifest()["spec"] | change)
    assert spec is None
    (problem,) = found
    assert problem.message.startswith("the job ")


def test_a_job_that_is_all_wrong_is_a_bounded_number_of_problems() -> None:
    """Red without the cut at the end."""
    wrong = {f"fieldNumber{number}": number for number in range(20_000)}
    spec, found = read_spec(a_manifest(**wrong)["spec"])
    assert spec is None
    assert len(found) <= MAX_PROBLEMS
    template = {"spec": {f"fieldNumber{number}": number for number in range(20_000)}}
    spec, found = read_spec(a_manifest(workers={"template": template})["spec"])
    assert 0 < len(found) <= MAX_PROBLEMS
    values = [{"name": f"c{number}", "image": number, "command": number} for number in range(5_000)]
    spec, found = read_spec(a_manifest(workers={"template": {"spec": {"containers": values}}})["spec"])
    assert 0 < len(found) <= MAX_PROBLEMS
    metadata = {f"fieldNumber{number}": number for number in range(20_000)}
    _, found = read_job({**a_manifest(**wrong), "metadata": {"name": "a", **metadata}})
    assert 0 < len(found) <= MAX_PROBLEMS, "of both kinds together"


def test_a_config_with_many_unknown_fields_is_a_bounded_number_of_problems() -> None:
    config = {f"hiddenSize{number}": number for number in range(4_000)}
    _, found = read_spec(a_manifest(training={"model": {"config": config}})["spec"])
    assert 0 < len(found) <= MAX_PROBLEMS
    assert "did you mean `hiddenSizes`?" in str(found[0])
    assert max(len(str(problem)) for problem in found) < 1000


def test_a_manifest_is_refused_with_twenty_problems_at_most() -> None:
    wrong = "\n".join(f"  wrong{number}: 1" for number in range(50))
    text = f"apiVersion: disttrain.io/v1alpha1\nkind: DistTrainingJob\nmetadata: {{name: x}}\nspec:\n{wrong}\n"
    with pytest.raises(ManifestError) as refused:
        parse(text)
    lines = str(refused.value).splitlines()
    assert len(lines) == MAX_LISTED + 1
    assert lines[-1].endswith("more problems")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


def true_depth(value: Any) -> int:
    if not value or not isinstance(value, dict | list):
        return 0
    return 1 + max(map(true_depth, value.values() if isinstance(value, dict) else value))


def true_count(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    inner = list(value.values() if isinstance(value, dict) else value)
    return len(inner) + sum(map(true_count, inner))


@given(value=JSON, depth=st.integers(0, 4), values=st.integers(0, 20))
def test_the_limits_mean_what_they_say(value: Any, depth: int, values: int) -> None:
    within = true_depth(value) <= depth and true_count(value) <= values
    assert (excess(value, Limits(depth, values, 10**6)) is None) is within


@given(st.text(), st.integers(3, 50))
def test_a_cut_text_fits_and_begins_as_the_text_does(text: str, most: int) -> None:
    short = cut(text, most)
    assert len(short.encode()) <= most
    assert short == text or (short.endswith("…") and text.startswith(short[:-1]))


def test_a_short_text_too_is_what_utf_8_can_say() -> None:
    assert cut("b\udcff.png") == "b?.png"


@given(st.lists(st.text(max_size=3_000), max_size=60))
def test_a_list_of_sentences_fits_and_says_how_many_more(sentences: list[str]) -> None:
    text = listed(sentences)
    assert len(text.encode()) <= MAX_MESSAGE_BYTES
    if len(sentences) > MAX_LISTED:
        assert f"; and {len(sentences) - MAX_LISTED} more" in text or " more" in text
    if len("; ".join(sentences).encode()) <= MAX_MESSAGE_BYTES and len(sentences) <= MAX_LISTED:
        assert text == "; ".join(sentences)


def test_a_real_job_is_far_from_the_bounds_of_all_jobs() -> None:
    raw = a_manifest(workers={"template": {"spec": {"containers": [{"name": "trainer", "image": "x:1"}]}}})
    tenth = Limits(MANIFEST.depth // 4, MANIFEST.values // 10, MANIFEST.bytes // 10)
    assert excess(json.loads(json.dumps(raw)), tenth) is None


ODD_KEYS = st.sampled_from(
    ["²", "9" * 5_000, "0", "-1", "", ".", "a.b", "config", "name", "hiddenSizes", "ß", "'", "`"]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ODD_KEYS, inner, max_size=4),
    max_leaves=10,
)


@given(config=st.dictionaries(ODD_KEYS, ODD, max_size=4), part=st.sampled_from(PARTS), own=st.booleans())
def test_any_config_is_read_or_refused_with_sentences(config: Raw, part: str, own: bool) -> None:
    raw = with_config(part, config) if own else a_manifest(training={part: {"config": config}})
    for problem in problems(raw):
        assert len(str(problem)) < 2_000


@given(ODD)
def test_anything_is_read_or_refused_with_sentences(value: Any) -> None:
    for raw in (value, {"spec": value}, a_manifest(training=value), a_manifest(workers={"template": value})):
        assert all(str(problem) for problem in problems(raw))
