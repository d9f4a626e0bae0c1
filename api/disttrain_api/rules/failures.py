"""Rules for the failure policy and the success policy."""

from disttrain_api.names import CONTAINER, Role
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.rules.pods import init_containers_that_end
from disttrain_api.rules.rule import Rule, when
from disttrain_api.run_policy import ExitCodeOperator, FailureAction, OnExitCodes, RestartPolicy, RestartStrategy
from disttrain_api.spec import JobSpec

_OF_ONE_POD = (FailureAction.RESTART_POD, FailureAction.IGNORE)


def _of_a_worker(spec: JobSpec, actions: tuple[FailureAction, ...]) -> bool:
    """Whether a rule asks for one of the actions when a worker fails."""
    policy = spec.run_policy.failure_policy
    rules = policy.rules if policy is not None else []
    return any(rule.action in actions and (rule.roles is None or Role.WORKER in rule.roles) for rule in rules)


def _on_servers(spec: JobSpec) -> bool:
    return spec.training is not None and spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER


def _in_place(spec: JobSpec) -> bool:
    return spec.run_policy.restart_strategy is RestartStrategy.IN_PLACE


def _in_step(spec: JobSpec) -> bool:
    """Whether no worker can do without the others, as far as the job says."""
    return _in_place(spec) if spec.training is None else not _on_servers(spec)


def _may_restart_in_place(spec: JobSpec) -> bool:
    started = (spec.training is not None or spec.workers.command is not None) and spec.parameter_servers is None
    return started and spec.run_policy.restart_policy is RestartPolicy.GANG


def _judges_ranks(spec: JobSpec) -> bool:
    """Whether a rule may match the failure of a rank, and does not only look at what the cluster says of its pod."""
    policy = spec.run_policy.failure_policy
    rules = policy.rules if policy is not None else []
    return any(rule.on_pod_conditions is None or rule.on_exit_codes or rule.signals or rule.reasons for rule in rules)


def _exit_codes(spec: JobSpec) -> list[OnExitCodes]:
    policy = spec.run_policy.failure_policy
    rules = policy.rules if policy is not None else []
    return [rule.on_exit_codes for rule in rules if rule.on_exit_codes is not None]


def _ends_no_pod(spec: JobSpec) -> bool:
    """Whether a rule waits for the exit code of a container whose end is not its pod's."""
    roles = [spec.workers, *([spec.parameter_servers] if spec.parameter_servers else [])]
    ending = {CONTAINER, *(name for role in roles for name in init_containers_that_end(role.template))}
    return any(wanted.container_name not in (None, *ending) for wanted in _exit_codes(spec))


def _inits_have_it(template: str) -> str:
    """CEL: an init container of the template is the one that the rule (r) names."""
    containers = f"{template}.spec.initContainers"
    ends = "(!has(c.restartPolicy) || c.restartPolicy != 'Always')"
    has_it = f"{containers}.exists(c, c.name == r.onExitCodes.containerName && {ends})"
    return f"(has({template}.spec) && has({containers}) && {has_it})"


_ANY_EXIT_CODES = "!has(self.runPolicy.failurePolicy) || self.runPolicy.failurePolicy.rules.all(r, !has(r.onExitCodes)"
_ON_SERVERS = "self.parallelism.dataParallel.mode == 'ParameterServer'"


FAILURE_RULES = (
    Rule(
        id="FailurePolicyNeedsGang",
        path="spec.runPolicy.failurePolicy",
        scope="spec.runPolicy",
        sentence="`failurePolicy` is a setting of restartPolicy Gang, not of Never: remove it, or change"
        " `restartPolicy` (a last rule with only `action: FailJob` has the same effect as Never)",
        check=lambda spec: when(
            spec.run_policy.restart_policy is RestartPolicy.NEVER and spec.run_policy.failure_policy is not None
        ),
        cel="self.restartPolicy != 'Never' || !has(self.failurePolicy)",
        reads=("spec.runPolicy.failurePolicy", "spec.runPolicy.restartPolicy"),
    ),
    Rule(
        id="InPlaceNeedsAgents",
        path="spec.runPolicy.restartStrategy",
        sentence="`restartStrategy` InPlace needs `training` or `workers.command`, restartPolicy Gang and no"
        " `parameterServers`: use Recreate, or change these",
        check=lambda spec: when(_in_place(spec) and not _may_restart_in_place(spec)),
        cel="self.runPolicy.restartStrategy != 'InPlace' || ((has(self.training) || has(self.workers.command))"
        " && !has(self.parameterServers) && self.runPolicy.restartPolicy == 'Gang')",
        reads=(
            "spec.runPolicy.restartStrategy",
            "spec.runPolicy.restartPolicy",
            "spec.training",
            "spec.workers.command",
            "spec.parameterServers",
        ),
    ),
    Rule(
        id="InPlaceHidesFailures",
        path="spec.runPolicy.failurePolicy",
        scope="spec.runPolicy",
        sentence="rules see no rank that fails and restarts in place: give each `onPodConditions` alone, or use"
        " `restartStrategy` Recreate",
        check=lambda spec: when(_in_place(spec) and _judges_ranks(spec)),
        cel="self.restartStrategy != 'InPlace' || !has(self.failurePolicy) || self.failurePolicy.rules.all(r,"
        " has(r.onPodConditions) && !has(r.onExitCodes) && !has(r.signals) && !has(r.reasons))",
        reads=("spec.runPolicy.failurePolicy", "spec.runPolicy.restartStrategy"),
    ),
    Rule(
        id="WorkersFailTogether",
        path="spec.runPolicy.failurePolicy",
        sentence="ranks of `training` or InPlace train in step and cannot continue without one of them: set"
        " `roles: [ps]` in rules with RestartPod or Ignore, or use RestartGang",
        check=lambda spec: when(_in_step(spec) and _of_a_worker(spec, _OF_ONE_POD)),
        cel=f"!(has(self.training) ? !({_ON_SERVERS}) : self.runPolicy.restartStrategy == 'InPlace')"
        " || !has(self.runPolicy.failurePolicy) || !self.runPolicy.failurePolicy.rules.exists(r,"
        " r.action in ['RestartPod', 'Ignore'] && (!has(r.roles) || 'worker' in r.roles))",
        reads=(
            "spec.runPolicy.failurePolicy",
            "spec.runPolicy.restartStrategy",
            "spec.training",
            "spec.parallelism.dataParallel.mode",
        ),
    ),
    Rule(
        id="WorkersOfServersComeBack",
        path="spec.runPolicy.failurePolicy",
        sentence="no other worker can replace worker 0, the leader: set `roles: [ps]` in rules with Ignore, or use"
        " RestartPod, with which the others continue until it is back",
        check=lambda spec: when(_on_servers(spec) and _of_a_worker(spec, (FailureAction.IGNORE,))),
        cel=f"!has(self.training) || !has(self.runPolicy.failurePolicy) || !({_ON_SERVERS})"
        " || !self.runPolicy.failurePolicy.rules.exists(r, r.action == 'Ignore' && (!has(r.roles) || 'worker' in"
        " r.roles))",
        reads=("spec.runPolicy.failurePolicy", "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="ExitCodeOfContainer",
        path="spec.runPolicy.failurePolicy",
        sentence="`onExitCodes.containerName` must be `trainer`, or an init container that is not a sidecar: no other"
        " container ends a pod",
        check=lambda spec: when(_ends_no_pod(spec)),
        cel=f"{_ANY_EXIT_CODES} || !has(r.onExitCodes.containerName) || r.onExitCodes.containerName == '{CONTAINER}'"
        f" || {_inits_have_it('self.workers.template')}"
        f" || (has(self.parameterServers) && {_inits_have_it('self.parameterServers.template')}))",
        reads=("spec.runPolicy.failurePolicy", "spec.workers.template", "spec.parameterServers.template"),
    ),
    Rule(
        id="ExitCodeOfFailure",
        path="spec.runPolicy.failurePolicy",
        sentence="exit code 0 is not a failure: remove it from the values of `onExitCodes` with operator In",
        check=lambda spec: when(
            any(wanted.operator is ExitCodeOperator.IN and 0 in wanted.values for wanted in _exit_codes(spec))
        ),
        cel=f"{_ANY_EXIT_CODES} || r.onExitCodes.operator != 'In' || !(0 in r.onExitCodes.values))",
    ),
    Rule(
        id="SuccessOfServersOfTraining",
        path="spec.runPolicy.successPolicy",
        sentence="`successPolicy.role` ps conflicts with `training`, whose servers run until the workers are done:"
        " use role worker",
        check=lambda spec: when(
            spec.run_policy.success_policy.role is Role.PS
            and spec.training is not None
            and spec.parameter_servers is not None
        ),
        cel="!has(self.parameterServers) || !has(self.training) || self.runPolicy.successPolicy.role != 'ps'",
        reads=("spec.runPolicy.successPolicy", "spec.training", "spec.parameterServers"),
    ),
    Rule(
        id="SuccessOfServersNeedsServers",
        path="spec.runPolicy.successPolicy",
        sentence="`successPolicy.role` is ps and the job has no `parameterServers`: add them, or use role worker",
        check=lambda spec: when(spec.run_policy.success_policy.role is Role.PS and spec.parameter_servers is None),
        cel="self.runPolicy.successPolicy.role != 'ps' || has(self.parameterServers)",
        reads=("spec.runPolicy.successPolicy", "spec.parameterServers"),
    ),
)
