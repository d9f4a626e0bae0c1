"""Suspension: the pods get SIGTERM and write a checkpoint within their grace; resuming is a new attempt."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.gang_actions import remove
from disttrain_operator.decide.ledger import end_attempt
from disttrain_operator.decide.observed import Job, Observed


def suspend(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Stop all pods while spec.suspend is true."""
    assert job.spec is not None
    if not job.spec.suspend:
        return None
    verdict = Verdict(reason=Reason.SUSPENDED, message="spec.suspend was set")
    ledger = end_attempt(job.status, now, verdict).model_copy(update={"start_time": None})
    existing = [pod for pod in observed.pods if not pod.gone]
    removal = remove(existing, job.spec.run_policy, now, "spec.suspend is true")
    if any(pod.alive for pod in existing):
        sentence = "spec.suspend is true: pods write a checkpoint and stop"
        event = Event(Reason.SUSPENDING, sentence)
        return Move(
            State.SUSPENDING, Reason.SUSPENDING, sentence, ledger, removal.actions, (event,), removal.look_again_at
        )
    sentence = "spec.suspend is true; set it to false to go on"
    event = Event(Reason.SUSPENDED, sentence)
    return Move(State.SUSPENDED, Reason.SUSPENDED, sentence, ledger, removal.actions, (event,), removal.look_again_at)
