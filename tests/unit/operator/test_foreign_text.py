"""What tenants, pods and servers have written reaches the operator's log and its Events as text, on one line."""

import json
import logging

from hypothesis import given
from hypothesis import strategies as st

from disttrain_operator.decide.decision import Event
from disttrain_operator.events import event_manifest
from disttrain_operator.logs import JsonFormatter, TextFormatter
from disttrain_operator.snapshot import Key
from tests.builders import NOW, UID

EVIL = "\x1b]0;owned\x07\x7f\x9b31m\u202e\u2066\ud800\r\n2026-11-27 ERROR forged: line"
any_text = st.text(st.characters(exclude_categories=()))


def a_record(message: str, *given: object, error: str | None = None) -> logging.LogRecord:
    exc_info = None
    if error is not None:
        try:
            raise ValueError(error)
        except ValueError as raised:
            exc_info = (type(raised), raised, raised.__traceback__)
    return logging.LogRecord("disttrain_operator", logging.WARNING, __file__, 1, message, given, exc_info)


@given(any_text)
def test_a_line_for_people_is_one_line_of_text(text: str) -> None:
    """Red where the message is logged as it is."""
    for line in (TextFormatter().format(a_record("%s: trying again", text)), TextFormatter().format(a_record(text))):
        assert line.replace("\t", "").isprintable()
    line.encode()


@given(any_text)
def test_a_traceback_ends_in_one_line_of_text(error: str) -> None:
    first, *frames, last = TextFormatter().format(a_record("unexpected", error=error)).split("\n")
    assert first.endswith("disttrain_operator: unexpected")
    assert frames[0] == "Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in frames[1:])
    assert last.startswith("ValueError")
    assert last.replace("\t", "").isprintable()


def test_a_chained_exception_is_logged_as_python_prints_it() -> None:
    try:
        try:
            raise ValueError("first")
        except ValueError:
            raise RuntimeError(EVIL)  # noqa: B904 - as most do
    except RuntimeError as raised:
        record = a_record("unexpected")
        record.exc_info = (type(raised), raised, raised.__traceback__)
    line = TextFormatter().format(record)
    between = "\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most"
    assert f"\nValueError: first{between}" in line
    assert line.split("\n")[-1].endswith("\\ud800\\r 2026-11-27 ERROR forged: line")


@given(any_text)
def test_an_object_of_json_is_one_line_and_its_strings_are_text(text: str) -> None:
    line = JsonFormatter().format(a_record("%s", text, error=text))
    assert line.isprintable()
    found = json.loads(line)
    for name in ("message", "traceback"):
        assert found[name].replace("\t", "").replace("\n", "").isprintable()


@given(any_text)
def test_an_event_is_text(text: str) -> None:
    """Red where the reason or the message is posted as it is."""
    key = Key("default", "digits", UID)
    event = event_manifest(key, "7", Event(text, f"rank 0 failed: {text}", warning=True), NOW)
    for field in ("reason", "message"):
        assert event[field].replace("\t", "").isprintable()
    json.dumps(event, ensure_ascii=False).encode()


def test_an_event_is_no_longer_than_the_api_server_takes() -> None:
    event = event_manifest(Key("default", "digits", UID), "7", Event("Because", EVIL * 1000), NOW)
    assert len(event["message"]) == 1024
    assert event["message"].startswith("\\x1b]0;owned\\x07\\x7f\\x9b31m\\u202e\\u2066\\ud800\\r 2026")
