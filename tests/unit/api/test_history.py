"""Entries of the history: what is kept of a finished job, how much of a namespace, and what foreign text costs."""

import json
from typing import Any

import pytest

from disttrain_api.history import MAX_ENTRY_BYTES, MAX_HISTORY_BYTES, changes, entry_of, read_entries

METADATA = {"name": "digits", "namespace": "team", "uid": "1234-abcd", "creationTimestamp": "2026-01-01T11:00:00Z"}
TIME = "2026-01-01T12:00:00Z"
KEY = "20260101T120000Z.1234-abcd"


def a_status(**more: Any) -> dict[str, Any]:
    condition = {"type": "Failed", "status": "True", "reason": "TooManyRestarts", "message": "it failed 4 times"}
    verdict = {"reason": "RankFailed", "message": "rank 3 failed", "class": "Program", "log": "secret", "exitCode": 1}
    return {
        "phase": "Failed",
        "completionTime": TIME,
        "attempt": 4,
        "restarts": 3,
        "mesh": "dp2",
        "conditions": [condition | {"lastTransitionTime": TIME, "observedGeneration": 1}],
        "attempts": [{"number": 4, "startTime": TIME, "verdict": verdict}],
        "progress": {"step": 7, "totalSteps": 9, "loss": 0.5, "updateTime": TIME},
        "checkpoint": {"step": 5, "path": "/checkpoints/a", "time": TIME},
    } | more


def config_map(**data: str) -> dict[str, Any]:
    return {"metadata": {"name": "disttrain-history", "namespace": "team"}, "data": data}


def test_an_entry_says_how_the_job_ended_without_its_log() -> None:
    found = entry_of(METADATA, a_status())
    assert found is not None
    key, text = found
    assert key == KEY
    assert "secret" not in text
    (entry,) = read_entries([config_map(**{key: text})])
    assert (entry.name, entry.namespace, entry.phase, entry.attempts, entry.restarts) == (
        "digits",
        "team",
        "Failed",
        4,
        3,
    )
    assert (entry.reason, entry.message) == ("TooManyRestarts", "it failed 4 times")
    assert entry.verdict is not None
    assert entry.verdict.message == "rank 3 failed"
    assert entry.progress is not None
    assert entry.checkpoint is not None
    assert (entry.progress.step, entry.progress.loss, entry.checkpoint.step) == (7, 0.5, 5)


@pytest.mark.parametrize(
    "changed",
    [{"phase": "Running"}, {"completionTime": None}, {"completionTime": "soon"}, {"attempts": "many"}, {"phase": 3}],
)
def test_a_job_whose_end_cannot_be_read_has_no_entry(changed: dict[str, Any]) -> None:
    assert entry_of(METADATA, a_status(**changed)) is None
    assert entry_of(METADATA, "nothing") is None


def test_an_entry_is_bounded_and_says_the_most_important() -> None:
    metrics = [{"name": "m" * 200 + str(number), "value": 1.0} for number in range(100)]
    long = {"progress": {"step": 7, "totalSteps": 9, "updateTime": TIME, "metrics": metrics}, "unknown": "x" * 10_000}
    for status in (a_status(**long), a_status(checkpoint={"step": 5, "path": "p" * 5000, "time": TIME})):
        found = entry_of(METADATA, status)
        assert found is not None
        assert len(found[1].encode()) <= MAX_ENTRY_BYTES
        assert json.loads(found[1])["message"] == "it failed 4 times"
    few = [{"name": str(number), "value": 1.0} for number in range(20)]
    found = entry_of(METADATA, a_status(progress={"step": 7, "totalSteps": 9, "updateTime": TIME, "metrics": few}))
    assert found is not None
    assert len(json.loads(found[1])["progress"]["metrics"]) == 8
    # A name that is no name of Kubernetes is nobody's job.
    assert entry_of(METADATA | {"uid": "../" * 30}, a_status()) is None
    assert entry_of(METADATA | {"name": "n" * 5000}, a_status()) is None


def key(number: int) -> str:
    return f"20260101T{number:06}Z.u"


def test_the_newest_entries_stay_and_what_is_no_entry_is_left_alone() -> None:
    old = {key(number): "{}" for number in range(3)} | {"mine": "x"}
    assert changes(None, {key(1): "{}"}, 2) == {key(1): "{}"}
    assert changes(old, {key(3): "{}"}, 3) == {key(3): "{}", key(0): None}
    # What is there is not written again, and an entry older than all that stay is not added.
    assert changes(old, {key(2): "changed"}, 3) == {}
    assert changes({key(5): "{}", key(4): "{}"}, {key(1): "{}"}, 2) == {}
    # Fewer are to be kept than before.
    assert changes(old, {}, 1) == {key(0): None, key(1): None}


def test_entries_of_a_namespace_are_bounded_in_bytes() -> None:
    large = {key(number): "x" * (MAX_HISTORY_BYTES // 4) for number in range(6)}
    assert set(changes(None, large, 1000)) == {key(number) for number in (3, 4, 5)}
    assert changes({key(9): "x" * 2 * MAX_HISTORY_BYTES}, {key(1): "{}"}, 10) == {key(9): None}


def test_entries_are_read_newest_first_and_foreign_text_is_passed_over() -> None:
    def text(number: int, **more: Any) -> str:
        return json.dumps({"name": f"j{number}", "namespace": "other", "uid": "u", "phase": "Failed"} | more)

    good = {key(n): text(n, completionTime=TIME, ofAnother="version") for n in (1, 2)}
    bad = {
        "mine": good[key(1)],
        key(3): "{",
        key(4): text(4),
        key(5): text(5, completionTime="soon"),
        key(6): text(6, completionTime=TIME, message="x" * MAX_ENTRY_BYTES),
        key(7): 7,
    }
    found = read_entries([{"metadata": {"namespace": "team"}, "data": {**good, **bad}}, config_map()])
    assert [(entry.name, entry.namespace) for entry in found] == [("j2", "team"), ("j1", "team")]
    assert read_entries([{"metadata": {"namespace": "team"}, "data": None}, {"metadata": {"namespace": "a"}}]) == []
