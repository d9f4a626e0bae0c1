"""When two failures are the same one."""

import pytest

from disttrain_api.report import (
    MAX_PLACE,
    MAX_TERMINATION_MESSAGE_BYTES,
    FailureSignature,
    PodReport,
    RankFailure,
    decode_pod_report,
    encode_pod_report,
)

FIRST = FailureSignature(error="ValueError", place="/app/model.py:7", step=9, steps_done=9)


@pytest.mark.parametrize(
    ("second", "same"),
    [
        ({}, True),
        ({"steps_done": 0}, True),
        ({"error": "TypeError"}, False),
        ({"place": "/app/model.py:8"}, False),
        ({"step": 10}, False),
        ({"step": None}, False),
    ],
)
def test_a_failure_repeats_where_error_place_and_step_are_equal(second: dict[str, object], same: bool) -> None:
    assert FIRST.model_copy(update=second).repeats(FIRST) is same


@pytest.mark.parametrize(("steps_done", "same"), [(0, True), (3, False), (None, False)])
def test_without_a_step_only_attempts_that_did_none_repeat(steps_done: int | None, same: bool) -> None:
    former = FailureSignature(error="ValueError", place="/app/model.py:7", steps_done=0)
    assert former.model_copy(update={"steps_done": steps_done}).repeats(former) is same
    assert former.repeats(former.model_copy(update={"steps_done": steps_done})) is same


def test_nothing_repeats_a_failure_without_a_signature() -> None:
    assert not FIRST.repeats(None)


def test_a_termination_message_keeps_the_signature_before_the_log() -> None:
    signature = FIRST.model_copy(update={"place": "é" * MAX_PLACE})
    failure = RankFailure(rank=0, message="m" * 9000, log_tail="l" * 9000, signature=signature)
    text = encode_pod_report(PodReport(failure=failure))
    assert len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES
    found = decode_pod_report(text)
    assert found.failure.signature == signature
