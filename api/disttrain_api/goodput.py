"""Counts a job's time by what it was spent on. Pure: the operator counts with it, and readers of a status go on."""

from collections.abc import Mapping
from datetime import datetime, timedelta

from disttrain_api.status import Goodput, GoodputState, StateSeconds
from disttrain_api.times import parse_time, timestamp

_MOST_SECONDS = 10**10
_STATES = frozenset(GoodputState)
UNKNOWN = "Unknown"
"""Counts for states of another version, which would else have no end of names."""


def by_state(goodput: Goodput) -> dict[str, int]:
    """Return the seconds of each state in which the job has been."""
    return {entry.state: entry.seconds for entry in goodput.spent}


def counted_until(goodput: Goodput, now: datetime) -> Goodput:
    """Return the count with the whole seconds since its last one added to its state.

    A clock that was set back adds nothing, and what has finished does not go on.
    """
    last = parse_time(goodput.update_time)
    passed = int((now - last).total_seconds()) if last is not None else 0
    if last is None or goodput.state is None or passed <= 0:
        return goodput
    state = goodput.state if goodput.state in _STATES else UNKNOWN
    seconds = by_state(goodput)
    # Anybody who may write statuses may write any number there, and the API server takes none beyond its own bound.
    seconds[state] = min(max(seconds.get(state, 0), 0) + passed, _MOST_SECONDS)
    counted = with_seconds(goodput, seconds)
    return counted.model_copy(update={"update_time": timestamp(last + timedelta(seconds=passed))})


def with_seconds(goodput: Goodput, seconds: Mapping[str, int]) -> Goodput:
    """Return the count with these seconds of each state, until the same time."""
    spent = [StateSeconds(state=name, seconds=number) for name, number in seconds.items()]
    return goodput.model_copy(update={"spent": spent, "percent": _percent(seconds)})


def _percent(seconds: Mapping[str, int]) -> int:
    total = sum(seconds.values())
    return min(max(seconds.get(GoodputState.TRAINING, 0) * 100 // total, 0), 100) if total > 0 else 0
