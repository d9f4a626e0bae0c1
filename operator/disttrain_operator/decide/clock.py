"""Times in a status. The clock itself is never read here: `now` always comes in as an argument."""

from datetime import UTC, datetime, timedelta


def timestamp(moment: datetime) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes it."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def after(text: str, seconds: float) -> datetime:
    """The moment `seconds` after a timestamp."""
    return datetime.fromisoformat(text).astimezone(UTC) + timedelta(seconds=seconds)


def earliest(*moments: datetime | None) -> datetime | None:
    """The first of those that are given."""
    return min((moment for moment in moments if moment is not None), default=None)
