"""What the failure and the success policy may ask for."""

from disttrain_api.names import Role
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.rules.rule import Rule, when
from disttrain_api.run_policy import FailureAction, RestartPolicy
from disttrain_api.spec import JobSpec

_OF_ONE_POD = (FailureAction.RESTART_POD, FailureAction.IGNORE)


def _of_a_worker(spec: JobSpec, actions: tuple[FailureAction, ...]) -> bool:
    """Whether a rule asks for one of the actions when a worker fails."""
    policy = spec.run_policy.failure_policy
    rules = policy.rules if policy is not None else []
    return any(rule.action in actions and (rule.roles is None or Role.WORKER in rule.roles) for rule in rules)


def _on_servers(spec: JobSpec) -> bool:
    return spec.training is not None and spec.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER


_ON_SERVERS = "self.parallelism.dataParallel.mode == 'ParameterServer'"


FAILURE_RULES = (
    Rule(
        id="FailurePolicyNeedsGang",
        path="spec.runPolicy.failurePolicy",
        scope="spec.runPolicy",
        sentence="`failurePolicy` is a setting of restartPolicy Gang, not of Never: remove it, or change"
        " `restartPolicy` (a last rule with nothing but `action: FailJob` says what Never says)",
        check=lambda spec: when(
            spec.run_policy.restart_policy is RestartPolicy.NEVER and spec.run_policy.failure_policy is not None
        ),
        cel="self.restartPolicy != 'Never' || !has(self.failurePolicy)",
        reads=("spec.runPolicy.failurePolicy", "spec.runPolicy.restartPolicy"),
    ),
    Rule(
        id="WorkersFailTogether",
        path="spec.runPolicy.failurePolicy",
        sentence="the ranks of `training` train in step and cannot go on without one of them: give rules with"
        " RestartPod or Ignore `roles: [ps]`, or use RestartGang",
        check=lambda spec: when(
            spec.training is not None and not _on_servers(spec) and _of_a_worker(spec, _OF_ONE_POD)
        ),
        cel=f"!has(self.training) || {_ON_SERVERS}"
        " || !has(self.runPolicy.failurePolicy) || !self.runPolicy.failurePolicy.rules.exists(r,"
        " r.action in ['RestartPod', 'Ignore'] && (!has(r.roles) || 'worker' in r.roles))",
        reads=("spec.runPolicy.failurePolicy", "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="WorkersOfServersComeBack",
        path="spec.runPolicy.failurePolicy",
        sentence="the work of worker 0, which leads, is done by nobody else: give rules with Ignore `roles: [ps]`, or"
        " use RestartPod, with which the other workers go on until it is back",
        check=lambda spec: when(_on_servers(spec) and _of_a_worker(spec, (FailureAction.IGNORE,))),
        cel=f"!has(self.training) || !({_ON_SERVERS}) || !has(self.runPolicy.failurePolicy)"
        " || !self.runPolicy.failurePolicy.rules.exists(r, r.action == 'Ignore' && (!has(r.roles) || 'worker' in"
        " r.roles))",
        reads=("spec.runPolicy.failurePolicy", "spec.parallelism.dataParallel.mode"),
    ),
    Rule(
        id="ProgressNeedsTraining",
        path="spec.runPolicy.progressDeadlineSeconds",
        sentence="the steps of a program of your own are not asked for: remove `progressDeadlineSeconds`, or use"
        " `training`",
        check=lambda spec: when(spec.run_policy.progress_deadline_seconds is not None and spec.training is None),
        cel="!has(self.runPolicy.progressDeadlineSeconds) || has(self.training)",
        reads=("spec.runPolicy.progressDeadlineSeconds", "spec.training"),
    ),
    Rule(
        id="SuccessOfServersOfTraining",
        path="spec.runPolicy.successPolicy",
        sentence="`successPolicy.role` ps does not go with `training`, whose servers serve until the workers are done:"
        " use role worker",
        check=lambda spec: when(
            spec.run_policy.success_policy.role is Role.PS
            and spec.training is not None
            and spec.parameter_servers is not None
        ),
        cel="self.runPolicy.successPolicy.role != 'ps' || !has(self.training) || !has(self.parameterServers)",
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
