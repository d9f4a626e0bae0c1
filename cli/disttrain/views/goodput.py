"""Goodput of a job, in words. Pure."""

from datetime import datetime

from disttrain.terminal import duration, plain
from disttrain_api.goodput import by_state, counted_until
from disttrain_api.status import Goodput

_SHOWN = 8


def share(goodput: Goodput, now: datetime) -> str:
    """Return how much of the time was training: "62% of 1h40m"."""
    until = counted_until(goodput, now)
    whole = sum(by_state(until).values())
    return f"{until.percent or 0}% of {duration(whole)}"


def in_words(goodput: Goodput, now: datetime) -> str:
    """Return the same with the time in each state, the longest first."""
    seconds = by_state(counted_until(goodput, now))
    longest = sorted(seconds.items(), key=lambda entry: -entry[1])[:_SHOWN]
    listed = ", ".join(f"{plain(state.lower(), most=32)} {duration(spent)}" for state, spent in longest if spent > 0)
    return share(goodput, now) + (f" ({listed})" if listed else "")
