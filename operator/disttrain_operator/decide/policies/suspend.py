"""Suspension: the pods get SIGTERM and write a checkpoint within their grace; resuming is a new attempt."""

from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.gang_actions import remove
from disttrain_operator.decide.ledger import end_attempt
from disttrain_operator.decide.situation import Situation


def suspend(situation: Situation) -> Move | None:
    """Stop all pods while spec.suspend is true."""
    if not situation.spec.suspend:
        return None
    verdict = Verdict(reason=Reason.SUSPENDED, message="spec.suspend was set")
    ledger = end_attempt(situation.status, situation.now, verdict).model_copy(update={"start_time": None})
    existing = [pod for pod in situation.observed.pods if not pod.gone]
    removal = remove(existing, situation.run_policy, situation.now, "spec.suspend is true")
    if any(pod.pod_alive for pod in existing):
        sentence = "spec.suspend is true: pods write a checkpoint and stop"
        event = Event(Reason.SUSPENDING, sentence)
        return Move(
            State.SUSPENDING, Reason.SUSPENDING, sentence, ledger, removal.actions, (event,), removal.look_again_at
        )
    sentence = "spec.suspend is true; set it to false to go on"
    event = Event(Reason.SUSPENDED, sentence)
    return Move(State.SUSPENDED, Reason.SUSPENDED, sentence, ledger, removal.actions, (event,), removal.look_again_at)
