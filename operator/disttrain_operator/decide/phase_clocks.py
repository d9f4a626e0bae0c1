"""How long ranks may show no sign that they get on, in what they do besides steps: by their agents' clocks.

A sign is a batch of an evaluation, a byte that is written, time of a processor (disttrain_agent.idle), so these clocks
wait for less than a phase takes. Ranks that have logged a step and take steps have the clock of hang.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from disttrain_api.report import AgentStatus, Idle, RankPhase, RankStatus
from disttrain_api.spec import JobSpec
from disttrain_operator.decide.live import Stall

_FIRST_DEADLINES, _FIRST_SECONDS = 3.0, 900.0
"""For what these ranks have not done before: a start, a first step that is compiled, a first evaluation."""
_LONGEST = 5.0
"""For the next evaluation or save, so many of the longest pauses in those before."""
_LEAST_SECONDS = {RankPhase.EVALUATING: 300.0, RankPhase.SAVING: 600.0}
"""A storage may be away for some minutes, and a server of data."""


def limit_of(idle: Idle, deadline: int) -> float:
    """Return the seconds for which a rank may show no sign that it gets on. deadline: the job's, for steps."""
    least = _LEAST_SECONDS.get(idle.phase)
    if least is None or idle.longest_seconds is None:
        return max(_FIRST_DEADLINES * deadline, _FIRST_SECONDS)
    return max(deadline, least, _LONGEST * idle.longest_seconds)


def idle_stall_of(status: AgentStatus, spec: JobSpec) -> Stall | None:
    """Return how long no rank of an agent's pod has shown any sign that it gets on; None where one has within its
    limit, its agent does not say, or all of them are judged by their steps."""
    deadline = spec.run_policy.progress_deadline_seconds
    if deadline is None or not status.ranks or all(_is_stepping(rank) for rank in status.ranks):
        return None
    found = [_stall_of(rank, spec, deadline) for rank in status.ranks]
    known = [stall for stall in found if stall is not None]
    return together(known) if len(known) == len(found) else None


def together(stalls: Sequence[Stall]) -> Stall:
    """Return the stall of all of these: that of the lowest rank, for as long as the last one has shown no sign."""
    first = min(stalls, key=lambda stall: stall.rank)
    return replace(first, seconds=min(stall.seconds for stall in stalls))


def _stall_of(rank: RankStatus, spec: JobSpec, deadline: int) -> Stall | None:
    idle, report = rank.idle, rank.report
    if idle is None or rank.exit_code is not None:
        return None
    if report is not None and (report.done or report.error is not None):
        return None
    # What else a program does before its first step is not known.
    if spec.training is None and rank.seconds_since_step is None:
        return None
    limit = limit_of(idle, deadline)
    if idle.seconds < limit:
        return None
    step = 0 if report is None else report.step
    return Stall(rank.rank, idle.seconds, step, None, phase=idle.phase, limit_seconds=limit)


def _is_stepping(rank: RankStatus) -> bool:
    return rank.seconds_since_step is not None and (rank.idle is None or rank.idle.phase is RankPhase.TRAINING)
