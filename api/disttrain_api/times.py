"""Times as Kubernetes writes them: RFC 3339 in whole seconds."""

from datetime import UTC, datetime
from typing import Any

EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(2200, 1, 1, tzinfo=UTC)
"""Sums with the longest durations of a job stay within what `datetime` holds."""

_MAX_LENGTH = 64


def timestamp(moment: datetime) -> str:
    """Return the moment in the form that Kubernetes writes."""
    # strftime takes four times as long.
    return moment.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="seconds") + "Z"


def parse_time(text: Any) -> datetime | None:
    """Return the moment of a timestamp; None where it is no time, or none between EARLIEST and LATEST."""
    if not isinstance(text, str) or not 0 < len(text) <= _MAX_LENGTH:
        return None
    try:
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return moment if EARLIEST <= moment <= LATEST else None
