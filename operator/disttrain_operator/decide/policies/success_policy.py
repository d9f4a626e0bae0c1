"""When the job is complete: all its workers have ended with exit code 0, or what its success policy says."""

from disttrain_api.names import Reason, Role
from disttrain_api.run_policy import SuccessOperator
from disttrain_api.status import Verdict
from disttrain_operator.decide.attempt_history import in_attempt
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang import replicas
from disttrain_operator.decide.situation import Situation


def success_policy(situation: Situation) -> Transition | None:
    """End the job when enough pods of the current attempt have succeeded. The others, servers mostly, end with them."""
    if not in_attempt(situation.status):
        return None
    gang, policy = situation.gang, situation.run_policy.success_policy
    deciding = set(_deciding(policy.operator, policy.role, replicas(situation.spec, policy.role)))
    succeeded = deciding & gang.succeeded
    if policy.operator is SuccessOperator.ANY and succeeded:
        return _complete(situation, policy.role, f"one {policy.role} succeeded")
    if len(succeeded) < len(deciding) and not gang.failed:
        return None
    open_ = deciding - succeeded - situation.failures.ignored
    if open_:
        return None
    if not succeeded:
        message = f"every {policy.role} that decides the job's success failed, and the failure policy ignores that"
        verdict = Verdict(reason=Reason.ALL_IGNORED, message=message)
        return finish(situation.status, situation.now, State.FAILED, verdict)
    named = f"{policy.role} 0" if policy.operator is SuccessOperator.FIRST else f"all {len(succeeded)} {policy.role}s"
    return _complete(situation, policy.role, f"{named} succeeded")


def _deciding(operator: SuccessOperator, role: Role, count: int) -> list[tuple[Role, int]]:
    return [(role, index) for index in range(1 if operator is SuccessOperator.FIRST else count)]


def _complete(situation: Situation, role: Role, message: str) -> Transition:
    reason = Reason.WORKERS_SUCCEEDED if role is Role.WORKER else Reason.SERVERS_SUCCEEDED
    return finish(situation.status, situation.now, State.COMPLETE, Verdict(reason=reason, message=message))
