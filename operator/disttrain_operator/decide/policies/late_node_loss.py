"""A dead node is noticed late: by then its job has restarted, and the exit of a peer was taken for the cause.

A pod of the attempt that ended has no exit, and its node does not report: then that was the first cause.
The verdict is put right, and a restart that was counted for it is given back.
"""

from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.status import FailureClass
from disttrain_operator.decide.attempt_history import last_ended, ran, revise_verdict
from disttrain_operator.decide.cause import node_is_lost
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.failure_policy import match_failure_policy
from disttrain_operator.decide.situation import Situation
from disttrain_operator.decide.verdict import verdict_of

# What may have been a symptom. The others are certain by themselves.
_DOUBTFUL = frozenset(
    {FailureClass.PROGRAM, FailureClass.STOPPED, FailureClass.PEER_LOST, FailureClass.POD_LOST, FailureClass.KILLED}
)
_RESTARTS = (FailureAction.RESTART_GANG, FailureAction.RESTART_WITHOUT_COUNTING)


def late_node_loss(situation: Situation) -> Transition | None:
    """Put the verdict over the last attempt right, once."""
    status, policy = situation.status, situation.run_policy
    ended = last_ended(status)
    if ended is None or ended.verdict is None or ended.verdict.class_ not in _DOUBTFUL or ran(status):
        return None
    silent = [pod for pod in situation.observed.pods if pod.attempt == ended.number and pod.cut_off]
    if not silent:
        return None
    cause = node_is_lost(silent[0])
    matched = match_failure_policy(policy, cause)
    if matched.action not in _RESTARTS:
        return None  # the job has restarted, and goes on
    given_back = ended.verdict.action == FailureAction.RESTART_GANG and matched.action != ended.verdict.action
    verdict = verdict_of(cause, matched, policy)
    revised = revise_verdict(status, ended.number, verdict, policy, situation.now, given_back=given_back)
    message = f"waiting for pods older than attempt {revised.attempt} to end"
    return Transition(State.RESTARTING, Reason.WAITING_FOR_OLD_PODS, message, revised, requeue_at=situation.now)
