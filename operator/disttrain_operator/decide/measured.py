"""Phases as rank 0 has measured them, in the job's goodput: who asks now and then misses short ones."""

from disttrain_api.goodput import by_state, with_seconds
from disttrain_api.report import PhaseSeconds, RankPhase, RankReport
from disttrain_api.status import Goodput, GoodputState, LifeOfRanks
from disttrain_api.times import parse_time

_PHASES = {
    "restoring": (RankPhase.RESTORING, GoodputState.RESTORING),
    "evaluating": (RankPhase.EVALUATING, GoodputState.EVALUATING),
    "saving": (RankPhase.SAVING, GoodputState.SAVING),
}
_BEGINS, _STEPS = (GoodputState.STARTING, GoodputState.RESTARTING), (GoodputState.TRAINING, GoodputState.REDOING)
"""States in which a phase counts that nobody has seen: before steps, and amid them."""


def corrected(goodput: Goodput, report: RankReport | None, former_state: str | None, *, heard: bool) -> Goodput:
    """Return the count with the phases that are over as the rank has measured them; its sum stays as it is.

    report: rank 0's newest; another rank's life would be another one. former_state: that of the job before. heard:
    whether ranks of the job had reported before.
    """
    measured = None if report is None else report.phase_seconds
    life = None if measured is None else _life_of(goodput, measured, heard=heard)
    if report is None or measured is None or life is None:
        return goodput
    seconds = by_state(goodput)
    for name, (phase, state) in _PHASES.items():
        # The operator alone counts one that is not over.
        if report.phase != phase:
            lacking = getattr(life, name) + int(getattr(measured, name)) - seconds.get(state, 0)
            _move(seconds, state, lacking, former_state)
    moved = goodput if seconds == by_state(goodput) else with_seconds(goodput, seconds)
    return moved if life == goodput.life else moved.model_copy(update={"life": life})


def _life_of(goodput: Goodput, measured: PhaseSeconds, *, heard: bool) -> LifeOfRanks | None:
    """Return the ranks' present life, which may have just begun; None: what was measured is of a former one."""
    life = goodput.life
    if life is not None and life.began == measured.began:
        return life
    known, began = None if life is None else parse_time(life.began), parse_time(measured.began)
    if began is None or (known is not None and began < known):
        return None
    seconds, counted = by_state(goodput), dict.fromkeys(_PHASES, 0)
    if life is None and heard:
        # An operator that did not know what ranks measure has counted this life so far.
        counted = {name: int(getattr(measured, name)) for name in _PHASES}
    before = {name: seconds.get(state, 0) - counted[name] for name, (_, state) in _PHASES.items()}
    return LifeOfRanks(began=measured.began, **before)


def _move(seconds: dict[str, int], state: GoodputState, lacking: int, former_state: str | None) -> None:
    """Move so many seconds to the state from others, or if they are negative from it, as far as there are any."""
    if lacking < 0:
        other = GoodputState.REDOING if former_state == GoodputState.REDOING else GoodputState.TRAINING
        taken = min(-lacking, max(0, seconds.get(state, 0)))
        seconds[state], seconds[other] = seconds.get(state, 0) - taken, seconds.get(other, 0) + taken
        return
    likely = (*_BEGINS, *_STEPS) if state is GoodputState.RESTORING else (*_STEPS, *_BEGINS)
    for other in sorted(likely, key=lambda one: one != former_state):
        taken = min(lacking, max(0, seconds.get(other, 0)))
        if taken:
            seconds[state], seconds[other] = seconds.get(state, 0) + taken, seconds[other] - taken
            lacking -= taken
