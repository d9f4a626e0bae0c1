"""Text that parsers refuse is read as far as it says whose it is."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_operator.kube.tolerant import Malformed, Unreadable, read_event, read_identity, walk

DEPTH = 20_000
METADATA = {"managedFields": [{"f:a": {}}], "name": "job", "namespace": "team", "resourceVersion": "7", "uid": "u-1"}
FOUND = Unreadable("team", "job", "u-1", 7, "why")

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def deep(opening: str = '{"a":', closing: str = "}") -> str:
    return opening * DEPTH + "1" + closing * DEPTH


def paths(value: Any, deepest: int, here: tuple[bytes, ...] = ()) -> list[tuple[tuple[bytes, ...], Any]]:
    """What `walk` should yield of a value."""
    if len(here) > deepest or not isinstance(value, dict | list | str):
        return []
    own = [(here, value)] if here else []
    if isinstance(value, str):
        return own
    inner = (
        [(b"", item) for item in value]
        if isinstance(value, list)
        else [(json.dumps(key)[1:-1].encode(), item) for key, item in value.items()]
    )
    return [entry for key, item in inner for entry in paths(item, deepest, (*here, key))] + own


@given(value=st.dictionaries(st.text(), values) | st.lists(values), deepest=st.integers(1, 4))
@pytest.mark.parametrize("separators", [(",", ":"), (", ", " : ")])
def test_a_walk_meets_all_that_a_parser_would(separators: tuple[str, str], value: Any, deepest: int) -> None:
    text = json.dumps(value, separators=separators).encode()
    met = [(path, json.loads(text[begin:end])) for path, begin, end in walk(text, deepest)]
    assert met == paths(value, deepest)


@given(text=st.binary() | st.text(alphabet='{}[]":,\\a', max_size=60).map(str.encode))
def test_a_walk_through_anything_ends(text: bytes) -> None:
    try:
        for _, begin, end in walk(text, 3):
            assert 0 <= begin < end <= len(text)
    except Malformed:
        pass
    read_event(text, "why", 1000)
    read_identity(text, "why")


@pytest.mark.parametrize("where", ["spec", "managedFields", "annotations"])
@pytest.mark.parametrize("brackets", [('{"a":', "}"), ("[", "]"), ('{"metadata":{"uid":"other","b":', "}}")])
def test_an_object_of_any_depth_says_whose_it_is(where: str, brackets: tuple[str, str]) -> None:
    raw = {"apiVersion": "v1", "metadata": dict(METADATA), "spec": {}}
    (raw if where == "spec" else raw["metadata"])[where] = "@"  # type: ignore[index]
    text = json.dumps(raw).replace('"@"', deep(*brackets)).encode()
    assert read_identity(text, "why") == FOUND
    line = b'{"type":"MODIFIED","object":' + text + b"}"
    assert read_event(line, "why", 200_000) == ("MODIFIED", FOUND)


def test_names_in_texts_and_in_other_places_are_not_taken_for_the_objects() -> None:
    quoted = '","uid":"other","namespace":"other'
    spec = {"uid": "other", "metadata": {"uid": "other"}, "text": quoted}
    metadata = {"annotations": {quoted: quoted, "uid": "other"}, "ownerReferences": [{"uid": "other"}]}
    raw = {"data": spec, "metadata": metadata | METADATA, "spec": spec}
    assert read_identity(json.dumps(raw).encode(), "why") == FOUND


def test_an_object_of_the_cluster_has_no_namespace() -> None:
    text = json.dumps({"metadata": {"uid": "u", "name": "node", "resourceVersion": "3"}, "spec": {"namespace": "x"}})
    assert read_identity(text.encode(), "why") == Unreadable("", "node", "u", 3, "why")


def test_a_line_without_its_end_says_whose_it_is() -> None:
    line = json.dumps({"type": "DELETED", "object": {"metadata": METADATA, "spec": {"text": "x" * 1000}}}).encode()
    assert read_event(line[:-500], "why", 1000) == ("DELETED", FOUND)


@pytest.mark.parametrize("uid", [None, 7, "", {"a": "b"}])
def test_an_object_without_a_uid_is_nobodys(uid: Any) -> None:
    assert read_identity(json.dumps({"metadata": METADATA | {"uid": uid}}).encode(), "why") is None


def test_the_work_for_an_event_is_bounded() -> None:
    line = b'{"type":"ADDED","object":{"data":' + b"[" * DEPTH + b"]" * DEPTH + b',"metadata":{"uid":"u"}}}'
    assert read_event(line, "why", 1000) == ("ADDED", None)
