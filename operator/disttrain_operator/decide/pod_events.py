"""The Events of a pod -> what holds it up. Anybody may have written them, and each may hold any text and any time.

A failure counts until a later step shows that it is overcome: a kubelet that pulls an image has mounted the volumes.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from disttrain_api.bounds import MAX_REASON_LENGTH, cut
from disttrain_api.times import EARLIEST, parse_time
from disttrain_operator.decide.init_containers import without_output
from disttrain_operator.decide.observed import PodEvent

Raw = Mapping[str, Any]

PULLING = "Pulling"
_STEPS = ("Scheduled", PULLING, "Pulled", "Created", "Started")
"""Reasons of the Events with which Kubernetes reports how a pod starts."""
# It repeats, minutes later, that a volume is not there; why not stands in another Event.
_SYMPTOM = "Unable to attach or mount volumes"
_MAX_MESSAGE = 1024


def what_holds_up(pod_uid: str, events: Iterable[Raw]) -> PodEvent | None:
    """Return the newest failure that no later step has overcome, or the pull that goes on; None where there is none."""
    timed = sorted(((time, event) for event in events if (time := _time(event))), key=lambda entry: entry[0])
    steps = [entry for entry in timed if entry[1].get("reason") in _STEPS]
    since, step = steps[-1] if steps else (EARLIEST, {})
    failures = [event for time, event in timed if event.get("type") == "Warning" and time > since]
    causes = [event for event in failures if not str(event.get("message")).startswith(_SYMPTOM)]
    if failures:
        return _fact(pod_uid, (causes or failures)[-1])
    return _fact(pod_uid, step) if step.get("reason") == PULLING else None


def _fact(pod_uid: str, event: Raw) -> PodEvent | None:
    reason, message = event.get("reason"), event.get("message")
    if not isinstance(reason, str) or not isinstance(message, str) or not reason or not message.strip():
        return None
    text = without_output(reason, message.strip())
    return PodEvent(pod_uid, cut(reason, MAX_REASON_LENGTH), cut(text, _MAX_MESSAGE))


def _time(event: Raw) -> datetime | None:
    """Return when it was last seen. Which of the times an Event has depends on its writer and the API."""
    series = event.get("series")
    last = series.get("lastObservedTime") if isinstance(series, Mapping) else None
    times = (last, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((time for text in times if (time := parse_time(text)) is not None), None)
