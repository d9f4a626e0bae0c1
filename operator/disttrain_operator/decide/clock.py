"""Times in a status. The clock itself is never read here: `now` always comes in as an argument."""

from datetime import datetime, timedelta

from disttrain_api.times import EARLIEST, parse_time, timestamp

__all__ = ["after", "earliest", "timestamp"]


def after(text: str, seconds: float) -> datetime:
    """The moment `seconds` after a timestamp. A time that cannot be read is long past."""
    return (parse_time(text) or EARLIEST) + timedelta(seconds=seconds)


def earliest(*moments: datetime | None) -> datetime | None:
    """The first of those that are given."""
    return min((moment for moment in moments if moment is not None), default=None)
