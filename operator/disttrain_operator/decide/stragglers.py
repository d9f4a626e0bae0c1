"""A rank that is slow all the time, as rank 0 reports it: a condition, an Event, and a note in the attempt.

At first it is only named. Once it was found to be slow often enough, the attempt keeps its node, which may then be
suspected (`attempt_history.py`).
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from disttrain_api.names import Reason, Role
from disttrain_api.report import RankReport
from disttrain_api.spec import JobSpec
from disttrain_api.status import ConditionType, JobStatus
from disttrain_api.times import parse_time
from disttrain_operator.decide.attempt_history import in_attempt, note_slow_node
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.decision import Event
from disttrain_operator.decide.observed import Observed

_RIGHT = 3
"""How often a rank must have been found to be slow before it says anything of its node."""

_UNJUDGED_SECONDS = 900
"""After ranks have started again nobody has been found to be slow yet, which says nothing."""


@dataclass(frozen=True)
class Straggler:
    """The slow rank of an attempt that runs."""

    sentence: str
    rank: int | None = None
    """None: what is known of it is not new."""
    node: str | None = None
    """Its node, where the rank was found to be slow often enough. None: it was not, or its node is not known."""


def straggler_of(status: JobStatus, observed: Observed, spec: JobSpec) -> Straggler | None:
    """Return the slow rank, None where there is none. While nobody says anything, what is known holds.

    The sentence says what was known when the rank was named: its figures change with each report.
    """
    said, live = _sentence(status), observed.live
    known = None if said is None else Straggler(said)
    if not in_attempt(status):
        return None
    if live is None or live.attempt != status.attempt or live.report is None:
        return known
    slow = live.report.slow_rank
    if slow is None or slow.rank >= spec.world_size:
        return None
    place = status.attempt, Role.WORKER, slow.rank // spec.workers.ranks_per_pod
    there = (pod for pod in observed.pods if (pod.attempt, pod.role, pod.index) == place and not pod.gone)
    pod = next(there, None)
    if pod is None or _is_older(live.report, pod.name, status):
        return known
    subject = f"rank {slow.rank} (pod {pod.name}" + (f" on node {pod.node})" if pod.node else ")")
    node = pod.node if slow.times >= _RIGHT else None
    if said is not None and said.startswith(f"{subject} "):
        return Straggler(said, slow.rank, node)
    own, others = f"{slow.seconds * 1000:.0f} ms", f"{slow.others_seconds * 1000:.0f} ms"
    return Straggler(
        f"{subject} is slow: its own work takes {own} per step, and {others} (median) that of the other ranks, which"
        " wait for it",
        slow.rank,
        node,
    )


def _is_older(report: RankReport, pod: str, status: JobStatus) -> bool:
    """Whether a report may be of ranks before the pod was recreated alone, perhaps on another node."""
    times = [after(entry.time, 0) for entry in status.attempts[-1].replacements if entry.pod == pod]
    logged = parse_time(report.step_time)
    return bool(times) and (logged is None or logged <= times[-1])


def with_slow_node(status: JobStatus, straggler: Straggler | None, observed: Observed, now: datetime) -> JobStatus:
    """Return the status, whose current attempt keeps the straggler's node as long as one is suspected of it."""
    if not in_attempt(status) or (straggler is not None and straggler.rank is None):
        return status
    restarts = None if observed.live is None else observed.live.restarts_in_place
    began = None if restarts is None else parse_time(restarts.time)
    if straggler is None and began is not None and now < began + timedelta(seconds=_UNJUDGED_SECONDS):
        return status
    attempt = status.attempts[-1]
    if straggler is not None and straggler.node is not None:
        return note_slow_node(status, straggler.node, straggler.rank)
    is_another = straggler is None or straggler.rank != attempt.slow_rank
    return note_slow_node(status, None, None) if attempt.slow_node is not None and is_another else status


def newly_named(before: JobStatus, status: JobStatus) -> str | None:
    """Return the sentence on a slow rank that `before` does not know; None: there is none."""
    said = _sentence(status)
    return None if said == _sentence(before) else said


def straggler_event(before: JobStatus, status: JobStatus) -> tuple[Event, ...]:
    """Return the Event for a slow rank that is named anew in `status`."""
    said = newly_named(before, status)
    return () if said is None else (Event(Reason.RANK_SLOW, said, warning=True),)


def _sentence(status: JobStatus) -> str | None:
    known = condition(status, ConditionType.STRAGGLING)
    return known.message if known is not None and known.status == "True" else None
