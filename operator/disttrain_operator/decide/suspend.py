"""Suspension: the pods get SIGTERM and write a checkpoint within their grace; resuming is a new attempt."""

from datetime import datetime

from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.actions import DeletePod
from disttrain_operator.decide.decision import Event, Move, State
from disttrain_operator.decide.ledger import end_attempt
from disttrain_operator.decide.observed import Job, Observed


def suspend(job: Job, observed: Observed, now: datetime) -> Move | None:
    """Stop all pods while runPolicy.suspend is true."""
    assert job.spec is not None
    if not job.spec.run_policy.suspend:
        return None
    verdict = Verdict(reason=Reason.SUSPENDED, message="runPolicy.suspend was set")
    ledger = end_attempt(job.status, now, verdict).model_copy(update={"start_time": None})
    alive = [pod for pod in observed.pods if pod.alive]
    deletions = tuple(
        DeletePod(pod.name, pod.uid, None, "runPolicy.suspend is true")
        for pod in observed.pods
        if not pod.gone and not pod.deleting
    )
    if alive:
        sentence = "runPolicy.suspend is true: pods write a checkpoint and stop"
        event = Event(Reason.SUSPENDING, sentence)
        return Move(State.SUSPENDING, Reason.SUSPENDING, sentence, ledger, deletions, event)
    sentence = "runPolicy.suspend is true; set it to false to go on"
    event = Event(Reason.SUSPENDED, sentence)
    return Move(State.SUSPENDED, Reason.SUSPENDED, sentence, ledger, deletions, event)
