"""Plain words mean what YAML 1.2 and kubectl both say, or are refused."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.pod_template import pod_template_schema
from disttrain_api.yaml12 import MAX_MERGED, MAX_VALUES, YamlError, read


def value(text: str) -> Any:
    """The value of the only document."""
    (document,) = read(text)
    return document.value


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("3e-4", 0.0003),
        ("1e3", 1000),
        ("-1.5E+2", -150),
        (".5", 0.5),
        ("5.", 5),
        ("1.0", 1),
        ("+5", 5),
        ("0", 0),
        ("0.10", 0.1),
        ("0x1F", 31),
        ("0o14", 12),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("null", None),
        ("1:30", "1:30"),
        ("2026-11-20", "2026-11-20"),
        ("1.2.3", "1.2.3"),
        ("'on'", "on"),
        ('"012"', "012"),
        ("!!str 012", "012"),
        ("yesterday", "yesterday"),
        ("_1", "_1"),
        ("e3", "e3"),
        ("=", "="),
    ],
)
def test_a_word_means(word: str, meaning: object) -> None:
    found = value(f"key: {word}")["key"]
    assert (type(found), found) == (type(meaning), meaning)


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("on", "true"),
        ("Off", "false"),
        ("yes", "true"),
        ("NO", "false"),
        ("y", "true"),
        ("N", "false"),
        # To kubectl octal numbers.
        ("012", "10 as kubectl reads it, 12 as YAML 1.2 does"),
        ("-07", "-7"),
        ("0640", "416 as kubectl reads it, 640 as YAML 1.2 does"),
        ("00", "0"),
        ("089", "89"),
        # To YAML 1.2 no numbers.
        ("1_000", "1000"),
        ("1_0.5", "10.5"),
        ("0_12", "10"),
        ("0b11", "3"),
        ("0X1F", "31"),
        ("-0x1F", "-31"),
        ("0x1_F", "31"),
        ("0o_", "a decimal number without leading zeros and underscores"),
        ("0" * 5000, "a decimal number without leading zeros and underscores"),
    ],
)
def test_a_word_with_two_meanings_is_refused_with_what_to_write(word: str, instead: str) -> None:
    shown = word if len(word) < 40 else f"{word[:39]}…"
    with pytest.raises(YamlError) as caught:
        value(f"key: {word}")
    assert str(caught.value) == (
        f"{shown} means one thing to YAML 1.2 and another to kubectl: write {instead}, or '{shown}' in quotes"
    )


VOLUME: dict[str, Any] = pod_template_schema()["properties"]["spec"]["properties"]["volumes"]


def modes(schema: dict[str, Any], location: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The integers of a volume whose names say that they are modes of files."""
    for key, field in schema.get("properties", {}).items():
        if field.get("type") == "integer" and key.lower().endswith("mode"):
            yield (*location, key)
        yield from modes(field, (*location, key))
    if "items" in schema:
        yield from modes(schema["items"], (*location, "0"))


@pytest.mark.parametrize("location", list(modes(VOLUME, ("workers", "template", "spec", "volumes"))), ids=".".join)
def test_a_mode_of_files_is_read_as_chmod_and_kubectl_read_it(location: tuple[str, ...]) -> None:
    text = "".join(
        f"{'  ' * depth}{'-' if part == '0' else f'{part}:'}\n" for depth, part in enumerate(location)
    ).rstrip()
    for word, mode in (("0751", 0o751), ("0444", 0o444), ("00", 0), ("493", 493), ("0o640", 0o640)):
        found = value(f"{text} {word}")
        for part in location:
            found = found[0] if part == "0" else found[part]
        assert found == mode
    for word in ("0798", "-0755", "0_755", "0" + "7" * 22):
        with pytest.raises(YamlError, match=f"^{word} means one thing to YAML 1.2 and another to kubectl: "):
            value(f"{text} {word}")


@pytest.mark.parametrize("text", ["mode: 0755", "volumes: [{size: 0755}]", "volumes: 0755", "defaultMode: [0755]"])
def test_other_numbers_are_no_modes_of_files(text: str) -> None:
    with pytest.raises(YamlError, match="another to kubectl: write 493 as kubectl reads it, 755 as YAML"):
        value(text)


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ('{\n\t"a": 1,\n\t"b":\t[1,\t2\t]\n}', {"a": 1, "b": [1, 2]}),
        ("a:\t1\t# one\nb: \t[x,\tz]\t\nc: 'a\tb'\n-d: e\t\n", {"a": 1, "b": ["x", "z"], "c": "a\tb", "-d": "e"}),
    ],
)
def test_tabs_between_words_are_read_as_kubectl_reads_them(text: str, meaning: object) -> None:
    assert value(text) == meaning


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: 2\na: 3", 3, "key `a` is given twice, in lines 1 and 3"),
        ("a: .inf", 1, ".inf is not a finite number"),
        ("a: 1e999", 1, "1e999 is not a finite number"),
        ("a: 99999999999999999999", 1, "99999999999999999999 is too large for an integer"),
        ("a:\n\tb: 1", 2, "a tab stands where YAML needs spaces"),
        ("a: [1, 2", 1, "not YAML: while parsing a flow sequence"),
        ("a: *b", 1, "not YAML: found undefined alias 'b'"),
        ("a: &a [*a]", 1, "an alias refers to a value that contains it"),
        (r'a: "\ud800"', 1, "a string contains half a character"),
        ("1: a", 1, "key 1 is not a string: write it in quotes"),
        ("on: a", 1, "key on is not a string: write it in quotes"),
        ("? [a]\n: b", 1, "a key must be a word"),
        ("a: !!binary aGk=", 1, "tag !!binary is not supported"),
        ("a: !!python/object:os.system {}", 1, "tag !!python/object:os.system is not supported"),
        ("a: 1\nb: \x07", 2, r"character '\x07' is not allowed in YAML"),
        ("<<: 3", 1, "`<<` takes over keys of an object, or of a list of objects"),
        ("[" * 5000, 1, "nested more than 100 levels deep"),
    ],
)
def test_what_cannot_be_read_says_why_and_where(text: str, line: int | None, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        read(text)
    assert (caught.value.line, str(caught.value)[: len(message)]) == (line, message)


def test_a_few_lines_that_mean_billions_are_refused() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    bomb += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    with pytest.raises(YamlError, match=f"more than {MAX_VALUES} values"):
        read(bomb)


def test_aliases_and_merged_keys_are_taken_over() -> None:
    text = "base: &base {a: 1, b: 2}\nother: &other {b: 3, c: 4}\nboth:\n  <<: [*base, *other]\n  a: 9\nsame: *base"
    assert value(text)["both"] == {"a": 9, "b": 2, "c": 4}
    assert value(text)["same"] == {"a": 1, "b": 2}


def test_every_key_and_item_has_its_line() -> None:
    (document,) = read("a:\n  b:\n    - x\n    - c: 1\n")
    assert document.lines == {
        (): 1,
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "b", 0): 3,
        ("a", "b", 1): 4,
        ("a", "b", 1, "c"): 4,
    }


def test_empty_documents_are_none() -> None:
    assert read("---\n# nothing\n---\n") == []
    assert [document.value for document in read("---\na: 1\n---\n---\nb: 2\n")] == [{"a": 1}, {"b": 2}]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=100), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_json_is_read_as_it_is(json_value: Any) -> None:
    for indent in (None, 1, "\t"):
        assert value(json.dumps({"key": json_value}, indent=indent)) == {"key": json_value}


@given(st.text(max_size=60))
def test_no_text_is_answered_with_a_traceback(text: str) -> None:
    with contextlib.suppress(YamlError):
        read(text)


def test_the_first_of_merged_objects_that_has_a_key_wins() -> None:
    assert value("{<<: [{a: 1, b: 1}, {b: 2, c: 2}], c: 3}") == {"a": 1, "b": 1, "c": 3}


def test_more_merged_objects_than_anybody_writes_are_refused() -> None:
    few, many = (", ".join(f"{{a{number}: 1}}" for number in range(count)) for count in (MAX_MERGED, 14_000))
    assert len(value(f"{{<<: [{few}]}}")) == MAX_MERGED
    with pytest.raises(YamlError, match="takes over 14000 objects, and may take over at most 100"):
        value(f"{{<<: [{many}]}}")
