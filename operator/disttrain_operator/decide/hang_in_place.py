"""A gang that hangs: its ranks start again in their pods first. If that does not come about, its pods are recreated."""

from datetime import timedelta

from disttrain_api.bounds import continued
from disttrain_api.run_policy import FailureAction, RestartStrategy
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import Event, RestartInPlace, State, Transition
from disttrain_operator.decide.hang import is_early
from disttrain_operator.decide.live import Stall
from disttrain_operator.decide.situation import Situation

ORDER_SECONDS = 90
"""After an order to restart in place: for the ranks to end, which their agents give a minute, and to be asked again."""


def in_place_first(situation: Situation, verdict: Verdict) -> Transition | Verdict | None:
    """Order a restart in place of the ranks that hang, or wait for it; return the verdict by which the attempt ends
    where the job asks for none, no restart is left in place, or none has come about; None: not yet."""
    live, policy, now = situation.observed.live, situation.run_policy, situation.now
    fails = verdict.action == FailureAction.FAIL_JOB
    if policy.restart_strategy is not RestartStrategy.IN_PLACE or fails or live is None or live.stall is None:
        return verdict
    order = situation.observed.order
    if order is None or (order.given.pod_uid, order.given.generation) != (live.pod_uid, live.generation):
        facts = live.pod_uid, live.attempt, live.generation, live.stall.step, _alone(live.stall), now
        action = RestartInPlace(*facts, why=verdict.message)
        return _ordered(situation, verdict, action)
    until = order.given.at + timedelta(seconds=ORDER_SECONDS)
    if order.refused is None and now < until:
        return _ordered(situation, verdict, order.given)
    if is_early(live.stall, situation.spec):
        return None
    why = f"it took more than {ORDER_SECONDS} s" if order.refused is None else order.refused
    return verdict.model_copy(update={"message": continued(verdict.message, f"no restart in place: {why}")})


def _alone(stall: Stall) -> int | None:
    """The rank to be killed alone. Whoever waits for it has the state of the last step, and may leave it in memory;
    what ranks have received that were in different calls is not to be relied on."""
    return stall.blame.rank if stall.blame is not None and stall.blame.awaited else None


def _ordered(situation: Situation, verdict: Verdict, action: RestartInPlace) -> Transition:
    sentence = continued(verdict.message, "its ranks are restarted in place")
    new = situation.observed.order is None or situation.observed.order.given != action
    return Transition(
        State.RUNNING,
        verdict.reason,
        sentence,
        situation.status,
        (action,) if new else (),
        (Event(verdict.reason, sentence, warning=True),),
        action.at + timedelta(seconds=ORDER_SECONDS),
    )
