"""For how long gangs that wait keep nodes from gangs that came after them.

A gang that does not fit keeps the nodes that it could use: where others took each node that becomes free, a large gang
would never have all of them at once. But the jobs that it waits for may run for weeks. So periods alternate.
In one nodes are reserved; in the next one, of the same length, every gang that fits is admitted. Then both are twice as
long, up to a longest period. They belong to the gate, not to a gang: many gangs, or gangs that are deleted and created
again, keep nodes no longer than one gang. They begin when a gang begins to wait for room that other jobs have, and end
when no gang does.

So no gang waits behind others for longer than the longest period at a stretch, nor for more than half of the time; and
a gang gets its room if the jobs in it end within the longest period.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from disttrain_operator.gate.admit import Outcome, WaitingGang, admit
from disttrain_operator.gate.fit import NodeFacts
from disttrain_operator.gate.room import Used

# The first period is this part of the longest.
FIRST_PART = 16


@dataclass(frozen=True)
class ReservationPeriod:
    """Whether nodes are kept for gangs that wait, and until when."""

    keeps: bool
    until: datetime


@dataclass(frozen=True)
class Admitted:
    """Result of one cycle."""

    outcomes: dict[str, Outcome]
    """By the job's uid."""
    period: ReservationPeriod
    waiting_since: datetime | None
    """Since when a gang has been waiting for room that other jobs have; None where none does."""


def period_at(since: datetime, now: datetime, longest: timedelta) -> ReservationPeriod:
    """Return the period at `now` of those that began at `since`."""
    length = longest / FIRST_PART
    begun = min(since, now)
    while now >= begun + 2 * length:
        if length == longest:
            begun += (now - begun) // (2 * length) * (2 * length)
        else:
            begun += 2 * length
            length = min(2 * length, longest)
    keeps = now < begun + length
    return ReservationPeriod(keeps, begun + length if keeps else begun + 2 * length)


def admit_in_period(
    gangs: Iterable[WaitingGang],
    nodes: Sequence[NodeFacts],
    used: Used,
    lasting: Used,
    *,
    waiting_since: datetime | None,
    now: datetime,
    longest: timedelta,
) -> Admitted:
    """Return what `admit` says in the period that it is. `waiting_since` is the last cycle's."""
    gangs = list(gangs)
    since = now if waiting_since is None else waiting_since
    period = period_at(since, now, longest)
    outcomes = admit(gangs, nodes, used, lasting, keep=period.keeps)
    waiting = [min(gang.waiting_since or now, now) for gang in gangs if outcomes[gang.uid].waits_for_others]
    if not waiting:
        return Admitted(outcomes, period, None)
    if waiting_since is None and min(waiting) < now:
        # A process that begins takes its place in the periods that the former one was in.
        since = min(waiting)
        period = period_at(since, now, longest)
        outcomes = admit(gangs, nodes, used, lasting, keep=period.keeps)
    return Admitted(outcomes, period, since)
