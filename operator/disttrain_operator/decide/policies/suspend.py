"""Suspension: the pods get SIGTERM and write a checkpoint within their grace; resuming is a new attempt."""

from disttrain_api.moved import CARRIED, MOVED
from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.attempt_history import end_attempt
from disttrain_operator.decide.decision import Event, State, Transition
from disttrain_operator.decide.gang_actions import remove
from disttrain_operator.decide.situation import Situation


def suspend(situation: Situation) -> Transition | None:
    """Stop all pods while spec.suspend is true, or in a job of an earlier version what was called so before."""
    if not situation.spec.suspend:
        return None
    former = next((field for field in situation.job.carried if CARRIED[field][1] == "spec.suspend"), None)
    field, advice = former or "spec.suspend", "set it to false to resume"
    if former is not None:
        advice = f"{MOVED[former]}: remove it to resume, as `disttrain resume` does"
    verdict = Verdict(reason=Reason.SUSPENDED, message=f"{field} was set")
    status = end_attempt(situation.status, situation.now, verdict).model_copy(update={"start_time": None})
    existing = [pod for pod in situation.observed.pods if not pod.gone]
    removal = remove(existing, situation.run_policy, situation.now, f"{field} is true")
    if any(pod.pod_alive for pod in existing):
        sentence = f"{field} is true: pods write a checkpoint and stop"
        event = Event(Reason.SUSPENDING, sentence)
        return Transition(
            State.SUSPENDING, Reason.SUSPENDING, sentence, status, removal.actions, (event,), removal.requeue_at
        )
    sentence = f"{field} is true; {advice}"
    event = Event(Reason.SUSPENDED, sentence)
    return Transition(
        State.SUSPENDED, Reason.SUSPENDED, sentence, status, removal.actions, (event,), removal.requeue_at
    )
