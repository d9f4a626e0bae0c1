"""Reaction to a pod's failure: the first rule of the policy that matches, else the default."""

from dataclasses import dataclass

from disttrain_api.names import CONTAINER
from disttrain_api.run_policy import (
    ExitCodeOperator,
    FailureAction,
    FailureRule,
    OnExitCodes,
    RestartPolicy,
    RunPolicy,
)
from disttrain_api.status import FailureClass
from disttrain_operator.decide.cause import Cause
from disttrain_operator.decide.observed import Exit, PodFacts

_UNCOUNTED = frozenset({FailureClass.DISRUPTION, FailureClass.NODE_LOST})


@dataclass(frozen=True)
class MatchedAction:
    """An action, and the rule that asked for it: its name or its place; None: the default."""

    action: FailureAction
    rule: str | None = None


def is_counted(cause: Cause) -> bool:
    """Return whether it is the job's fault and not counted yet.

    What the cluster does to a job is not its fault, whichever pods are created again for it. What follows from a pod
    that was created again was counted with that pod, unless it was in the budget that such pods have of their own.
    """
    return cause.class_ not in _UNCOUNTED and (cause.follows is None or cause.follows.counted)


def match_failure_policy(policy: RunPolicy, cause: Cause) -> MatchedAction:
    """Return the action of the first rule that matches this cause, else the default."""
    rules = policy.failure_policy.rules if policy.failure_policy is not None else []
    for number, rule in enumerate(rules, start=1):
        if _matches(rule, cause):
            return MatchedAction(rule.action, rule.name or f"rule {number}")
    if cause.permanent or policy.restart_policy is RestartPolicy.NEVER:
        return MatchedAction(FailureAction.FAIL_JOB)
    if not is_counted(cause):
        return MatchedAction(FailureAction.RESTART_WITHOUT_COUNTING)
    return MatchedAction(FailureAction.RESTART_GANG)


def gang_action(symptom: MatchedAction, cause: Cause) -> MatchedAction:
    """Return the gang's action for a symptom whose cause would by itself concern one pod."""
    if symptom.action is not FailureAction.RESTART_GANG or symptom.rule is not None or is_counted(cause):
        return symptom
    return MatchedAction(FailureAction.RESTART_WITHOUT_COUNTING)


def _matches(rule: FailureRule, cause: Cause) -> bool:
    pod = cause.pod
    return (
        (rule.roles is None or pod.role in rule.roles)
        and (rule.on_exit_codes is None or _code_matches(rule.on_exit_codes, pod.exit))
        and (rule.signals is None or pod.signal in rule.signals)
        and (rule.reasons is None or bool({cause.reason, pod.exit.reason if pod.exit else ""} & set(rule.reasons)))
        and (rule.on_pod_conditions is None or _condition_matches(rule, pod))
    )


def _code_matches(wanted: OnExitCodes, exit_: Exit | None) -> bool:
    # 0 is no failure, as for a Job: NotIn does not match it.
    if exit_ is None or not exit_.code:
        return False
    if wanted.container_name not in (None, exit_.init_container or CONTAINER):
        return False
    return (exit_.code in wanted.values) is (wanted.operator is ExitCodeOperator.IN)


def _condition_matches(rule: FailureRule, pod: PodFacts) -> bool:
    return any(
        (found.type, found.status) == (wanted.type, wanted.status) and wanted.reason in (None, found.reason)
        for wanted in rule.on_pod_conditions or []
        for found in pod.conditions
    )
