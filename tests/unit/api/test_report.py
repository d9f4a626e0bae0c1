"""What a pod says of itself is bounded: a bad value costs that value, or the report, and never more."""

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disttrain_api.report import (
    MAX_METRICS,
    MAX_TERMINATION_MESSAGE_BYTES,
    PodReport,
    RankError,
    RankFailure,
    RankReport,
    RestartsInPlace,
    decode_pod_report,
    encode_pod_report,
)

CHECKPOINT = {"step": 50, "path": "/checkpoints/x/step-50", "time": "2026-01-01T12:00:00Z"}
PROGRESS = {"rank": 0, "step": 50, "totalSteps": 100, "loss": 0.5, "checkpoint": CHECKPOINT}
FAILURE = {"rank": 1, "exitCode": 1, "reason": "RankFailed", "message": "no", "logTail": "line"}


def decoded(**parts: Any) -> PodReport:
    report = decode_pod_report(json.dumps(parts))
    assert report is not None
    return report


def progress(**changes: Any) -> RankReport:
    found = decoded(progress=PROGRESS | changes, failure=FAILURE).progress
    assert found is not None
    return found


def test_a_sound_report_is_read_as_it_was_written() -> None:
    report = PodReport(progress=RankReport(rank=0, step=3, metrics={"loss": 1.5}), failure=RankFailure(rank=1))
    assert decode_pod_report(encode_pod_report(report)) == report


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, "many", 10**400])
def test_a_figure_that_is_no_finite_number_is_left_out(number: Any) -> None:
    assert progress(loss=number, samplesPerSecond=number) == progress(loss=None)
    assert progress(metrics={"accuracy": 0.5, "loss": number}).metrics == {"accuracy": 0.5}


@pytest.mark.parametrize("step", [2**63, -1, 10**40, 1.5, "x", None, [1]])
def test_a_step_that_cannot_be_costs_the_progress_and_not_the_failure(step: Any) -> None:
    report = decoded(progress=PROGRESS | {"step": step}, failure=FAILURE)
    assert report.progress is None
    assert report.failure is not None


@pytest.mark.parametrize("time", ["soon", "", "0000-01-01T00:00:00Z", "99999-01-01T00:00:00Z", 7, None, "9" * 3000])
def test_a_checkpoint_without_a_time_is_left_out(time: Any) -> None:
    found = progress(checkpoint=CHECKPOINT | {"time": time})
    assert (found.step, found.checkpoint) == (50, None)


def test_a_time_is_written_as_kubernetes_writes_it() -> None:
    found = progress(checkpoint=CHECKPOINT | {"time": "2026-01-01T13:00:00.123456+01:00"})
    assert found.checkpoint.time == "2026-01-01T12:00:00Z"


def test_metrics_are_bounded_in_number_and_length() -> None:
    assert len(progress(metrics={f"m{number}": 1.0 for number in range(200)}).metrics) == MAX_METRICS
    assert progress(metrics={"x" * 1000: 1.0, "": 1.0, "accuracy": 1.0}).metrics == {"accuracy": 1.0}


@pytest.mark.parametrize("field", ["exitCode", "signal"])
@pytest.mark.parametrize("number", [2**63, -(2**63), "x", 1.5])
def test_a_number_of_a_failure_that_cannot_be_is_left_out(field: str, number: Any) -> None:
    failure = decoded(failure=FAILURE | {field: number}).failure
    assert failure.message == "no"
    assert getattr(failure, "exit_code" if field == "exitCode" else field) is None


def test_fields_of_another_version_are_passed_by() -> None:
    report = decoded(progress=PROGRESS | {"epoch": 3}, failure=FAILURE | {"device": "cuda:0"}, mood="good")
    assert report.progress is not None
    assert report.failure is not None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "Traceback (most recent call last):",
        '{"progress": ',
        '{"failure":' * 600 + "1" + "}" * 600,
        "[" * 4000,
        json.dumps({"failure": FAILURE | {"message": "x" * 10_000}}),
        '{"failure": {"rank": 0, "message": "\\ud800"}}',
    ],
)
def test_what_is_no_report_or_too_long_for_one_is_none_or_says_nothing(text: str) -> None:
    assert decode_pod_report(text) in (None, PodReport())


NUMBERS = st.sampled_from([math.inf, -math.inf, math.nan, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**40])
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | NUMBERS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["progress", "failure", *PROGRESS, *FAILURE, *CHECKPOINT]), inner)
    ),
)


def any_in(sound: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What is sound but for one value, at any place; or no object at all."""
    changed = st.tuples(st.sampled_from([*sound]), ANY_JSON).map(lambda found: sound | {found[0]: found[1]})
    metrics = NUMBERS.map(lambda number: sound | {"metrics": {"loss": number, "accuracy": 1.0}})
    return changed | metrics | ANY_JSON


@given(any_in(PROGRESS), any_in(FAILURE))
@example(PROGRESS | {"loss": math.inf}, FAILURE)
@example(PROGRESS | {"step": 2**63}, FAILURE)
@example(PROGRESS | {"checkpoint": CHECKPOINT | {"step": 2**63}}, FAILURE)
@example(PROGRESS, FAILURE | {"exitCode": 2**63})
def test_any_json_is_read_into_what_the_status_can_hold(reported: Any, failed: Any) -> None:
    """Red where a loss or a metric may be no finite number, and where a count may have more than 64 bits."""
    report = decode_pod_report(json.dumps({"progress": reported, "failure": failed}))
    if report is None:
        return
    # What the API server refuses in a status: numbers that are none, and integers beyond 64 bits.
    written = json.dumps(report.model_dump(mode="json"), allow_nan=False)
    assert all(abs(number) < 2**63 for number in _integers(json.loads(written)))


def _integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in _integers(item)]
    if isinstance(value, list):
        return [number for item in value for number in _integers(item)]
    return [value] if isinstance(value, int) else []


def test_a_report_fits_the_message_whatever_it_holds() -> None:
    metrics = {f"{number:03}" + "m" * 200: float(number) for number in range(60)}
    long = "word " * 2000
    error = RankError(exit_code=1, reason="RankFailed", message=long)
    kept = RankReport(rank=0, step=7, total_steps=9, metrics=metrics, error=error)
    failure = RankFailure(rank=0, exit_code=1, message=long, log_tail=long)
    for report in (PodReport(progress=kept), PodReport(progress=kept, failure=failure)):
        text = encode_pod_report(report)
        assert len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES
        read = decode_pod_report(text)
        assert (read.progress.step, read.progress.total_steps) == (7, 9)


def test_restarts_in_place_are_cut_before_the_last_failure() -> None:
    long = "é" * 1000
    last = RestartsInPlace(
        count=3,
        time="2026-01-01T12:00:00Z",
        failure=RankFailure(rank=1, exit_code=1, message=long, unquoted="KeyError"),
    )
    failure = RankFailure(rank=0, exit_code=1, message=long, unquoted="ValueError", log_tail="line")
    text = encode_pod_report(PodReport(progress=RankReport(rank=0, step=7), failure=failure, restarts_in_place=last))
    assert len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES
    read = decode_pod_report(text)
    assert read.failure == failure
    assert (read.restarts_in_place.count, read.restarts_in_place.failure.rank) == (3, 1)
    assert len(read.restarts_in_place.failure.message or "") < 1000
