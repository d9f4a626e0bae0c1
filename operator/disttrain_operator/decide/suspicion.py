"""A rank that seems to hang, after some of the job's own steps: a condition and an Event.

What restarts a job is in hang.py. This is sooner, and is withdrawn when a step ends.
"""

from dataclasses import dataclass

from disttrain_api.names import Reason
from disttrain_api.report import AgentStatus, RankPhase
from disttrain_api.status import ConditionType, JobStatus, Phase
from disttrain_operator.decide.attempt_history import in_attempt
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.decision import Event, Order
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.hang import pod_of, subject_of, trains
from disttrain_operator.decide.live import Blame, Live, Suspicion
from disttrain_operator.decide.restarts_in_place import restarts_of

_MEDIANS, _LONGEST = 3.0, 1.5
SLACK_SECONDS = 1.0
"""Beyond so many medians of a step, and so many times the longest of the last steps, whichever is more: then a rank may
be named."""
LOOKS_APART_SECONDS = 0.5
"""Between two looks at the stacks, which must say the same. The first may come so long before the slack is over."""
_UNCERTAIN_LONGEST, _UNCERTAIN_SECONDS = 5.0, 60.0
"""For a rank that computes or reads, both together: a slow sample, a compilation or a busy disk look like a hang."""


@dataclass(frozen=True)
class Standstill:
    """All ranks of some pods take steps, and have ended none for longer than their own steps take."""

    still_seconds: float
    """The time since the last of them ended a step."""
    median_seconds: float
    longest_seconds: float
    """Both are the slowest rank's, over its last steps."""

    def left(self, slack: float) -> float:
        """Return the seconds until they have ended no step for `slack` longer than their own steps take; none are left
        where this is not positive."""
        usual = max(_MEDIANS * self.median_seconds, _LONGEST * self.longest_seconds)
        return usual + slack - self.still_seconds

    def __and__(self, other: "Standstill") -> "Standstill":
        """The standstill of the pods of both."""
        return Standstill(
            min(self.still_seconds, other.still_seconds),
            max(self.median_seconds, other.median_seconds),
            max(self.longest_seconds, other.longest_seconds),
        )


def standstill_of(status: AgentStatus) -> Standstill | None:
    """Return how long the ranks of an agent's pod have ended no step; None where one does anything else than steps, its
    agent does not know how long these take, or these explain it."""
    paces = [rank.pace for rank in status.ranks if trains(rank)]
    known = [pace for pace in paces if pace is not None]
    if not known or len(known) < len(status.ranks):
        return None
    found = Standstill(
        min(pace.still_seconds for pace in known),
        max(pace.median_seconds for pace in known),
        max(pace.longest_seconds for pace in known),
    )
    return found if found.left(slack=0.0) <= 0 else None


def suspect(former: Blame | None, latter: Blame | None, standstill: Standstill) -> Suspicion | None:
    """Return which rank hangs, by two looks at the stacks of all ranks within the standstill of all pods; None where
    something has moved between them, they tell no rank, the time is not over, or it may just be slow."""
    if former is None or former != latter or standstill.left(SLACK_SECONDS) > 0:
        return None
    least = _UNCERTAIN_SECONDS + _UNCERTAIN_LONGEST * standstill.longest_seconds
    if not former.certain and standstill.still_seconds < least:
        return None
    return Suspicion(former, standstill.still_seconds, standstill.median_seconds, standstill.longest_seconds)


def suspicion_of(status: JobStatus, gang: Gang) -> str | None:
    """Return the sentence on the rank that seems to hang; None: none does. It says what was known when the rank was
    named. While nobody says anything, what is known holds; so it does while ranks are killed for it.

    gang: of the attempt that the status has been in.
    """
    said, live = _sentence(status), gang.observed.live
    if not in_attempt(status) or status.attempt != gang.attempt:
        return None
    if live is None or live.attempt != gang.attempt:
        return said
    if live.suspicion is None:
        return said if _is_being_killed(gang.observed.order, live) else None
    found, blame = live.suspicion, live.suspicion.blame
    pod = pod_of(blame.rank, gang)
    if (pod is None and blame.rank is not None) or gang.missing or not all(one.undisturbed for one in gang.pods):
        return said
    return said or (
        f"{subject_of(blame.rank, pod)}{blame.why}: no rank has ended a step for {found.still_seconds:.1f} s,"
        f" and a step takes {found.median_seconds:.3g} s (median)"
    )


def suspicion_event(before: JobStatus, status: JobStatus) -> tuple[Event, ...]:
    """Return the Event for a rank that is suspected anew in `status`, or not any more though its attempt goes on."""
    former, said = _sentence(before), _sentence(status)
    if said is not None and said != former:
        return (Event(Reason.HANG_SUSPECTED, said, warning=True),)
    return (Event(Reason.NOT_HANGING, "the ranks take steps again"),) if is_withdrawn(before, status) else ()


def is_suspected(before: JobStatus, status: JobStatus) -> bool:
    """Whether a rank is suspected anew."""
    return _sentence(status) not in (None, _sentence(before))


def is_withdrawn(before: JobStatus, status: JobStatus) -> bool:
    """Whether no rank is suspected any more though the same ranks run on: it was a false alarm, or the rank goes on."""
    over = _sentence(before) is not None and _sentence(status) is None
    begins = (RankPhase.RESTARTING, RankPhase.RESTORING)
    restarts = status.progress is not None and status.progress.phase in begins
    same = status.attempt == before.attempt and restarts_of(status) == restarts_of(before)
    return over and status.phase == Phase.RUNNING and same and not restarts


def _is_being_killed(order: Order | None, live: Live) -> bool:
    """Whether the ranks that an agent has spoken of restart in place by an order: none of them takes steps again."""
    if order is None or order.refused is not None:
        return False
    return (order.given.pod_uid, order.given.generation) == (live.pod_uid, live.generation)


def _sentence(status: JobStatus) -> str | None:
    known = condition(status, ConditionType.HANG_SUSPECTED)
    return known.message if known is not None and known.status == "True" else None
