"""What the container `trainer` of each role runs, said in the template or beside it."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import IMAGE, RESERVED_VARIABLES, Refusal, own_program, servers, untrained


def _workers(container: Mapping[str, Any], **beside: Any) -> dict[str, Any]:
    return untrained(own_program(container) | beside)


def _servers(container: Mapping[str, Any], **beside: Any) -> dict[str, Any]:
    return untrained(own_program(), parameterServers=own_program(container) | beside)


def _on_exit(operator: str, values: list[int], **more: str) -> dict[str, Any]:
    codes = {"operator": operator, "values": values, **more}
    return {"failurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": codes}]}}


def _fetching(name: str, **more: str) -> dict[str, Any]:
    """A pod with an init container of this name."""
    return {"template": {"spec": {"initContainers": [{"name": name, "image": "a:1"} | more]}}}


BESIDE = (("Workers", "spec.workers", _workers), ("Servers", "spec.parameterServers", _servers))


def _logged(*patterns: str, **progress: Any) -> dict[str, Any]:
    """A command whose output these rules read."""
    rules = {"logRules": [{"pattern": pattern} for pattern in patterns or ("step (?P<step>[0-9]+)",)]}
    return untrained({"image": "an/image:1", "command": ["train"]}, progress=rules | progress)


_TOTAL = "exactly one of `totalSteps` and a group `totalSteps` of a pattern must say how many steps there are"
PROGRAM_REFUSALS = (
    Refusal(
        "ProgressOfTraining",
        "spec.progress",
        "`training` reports its progress itself: remove `progress`, or use a command of your own",
        {"progress": _logged(totalSteps=9)["progress"]},
    ),
    Refusal(
        "ProgressNeedsCommand",
        "spec.progress",
        "`progress` needs `workers.command`, whose output is read: give it there, not in the template",
        _logged(totalSteps=9) | {"workers": own_program(IMAGE | {"command": ["train"]})},
    ),
    Refusal(
        "LogRulePattern",
        "spec.progress.logRules",
        "each `pattern` must be an RE2 expression with a named group for each number, such as (?P<step>[0-9]+); RE2 has"
        " no lookaround and no backreference",
        _logged("(?P<step>[0-9]+)", "loss ([0-9.]+)", totalSteps=9),
    ),
    Refusal(
        "LogRulesReadStep",
        "spec.progress.logRules",
        "one of the patterns must have a group `step`, the number of steps that are done",
        _logged("(?P<steps>[0-9]+)", totalSteps=9),
    ),
    Refusal("LogRulesReadTotal", "spec.progress", _TOTAL, _logged()),
    Refusal("LogRulesReadTotal", "spec.progress", _TOTAL, _logged("(?P<step>.)/(?P<totalSteps>.)", totalSteps=9)),
    *(
        Refusal(
            "ExitCodeOfContainer",
            "spec.runPolicy.failurePolicy",
            "`onExitCodes.containerName` must be `trainer`, or an init container that is not a sidecar: no other"
            " container ends a pod",
            {"workers": _fetching("fetch", **more), "runPolicy": _on_exit("In", [7], containerName=name)},
        )
        for name, more in {"fetsh": {}, "fetch": {"restartPolicy": "Always"}}.items()
    ),
    Refusal(
        "ExitCodeOfFailure",
        "spec.runPolicy.failurePolicy",
        "exit code 0 is not a failure: remove it from the values of `onExitCodes` with operator In",
        {"runPolicy": _on_exit("In", [0, 7])},
    ),
    Refusal(
        "SomethingToRun",
        "spec.workers",
        "nothing to run: set `spec.training`, or an `image` or a `command` of the container `trainer`",
        untrained(own_program({"name": "trainer", "args": ["train"]}, {"name": "other", "image": "an/image:1"})),
    ),
    Refusal(
        "OneProgram",
        "spec.workers",
        "`spec.training` decides what the container `trainer` runs, so it may have no `command` and no `args`: remove"
        " them, or `spec.training`",
        {"workers": own_program(IMAGE | {"args": ["train"]})},
    ),
    Refusal(
        "OneProgram",
        "spec.workers",
        "`spec.training` decides what the container `trainer` runs, so it may have no `command` and no `args`: remove"
        " them, or `spec.training`",
        {"workers": {"args": ["train"]}},
    ),
    *(
        Refusal(
            f"{role}FieldOnce",
            path,
            "`image`, `command`, `args`, `env`, `envFrom`, `resources`: set each of them here or in the template's"
            " container `trainer`, not in both",
            changes({"name": "trainer", "image": "an/image:1", "env": []}, env=[]),
        )
        for role, path, changes in BESIDE
    ),
    *(
        Refusal(
            f"{role}EnvironmentBeside",
            f"{path}.env",
            RESERVED_VARIABLES,
            changes(IMAGE, env=[{"name": "MINE", "value": "1"}, {"name": name, "value": "1"}]),
        )
        for role, path, changes in BESIDE
        for name in ("RANK", "DISTTRAIN_ANYTHING")
    ),
    Refusal(
        "ServersProgram",
        "spec.parameterServers",
        "the servers have nothing to run: set an `image` or a `command` of their container `trainer`",
        servers({"name": "trainer"}),
    ),
    Refusal(
        "GpusByGpusPerPod",
        "spec.workers",
        "`nvidia.com/gpu` must not be in `resources`: request it with `gpusPerPod`",
        {"workers": own_program({"name": "side", "resources": {"limits": {"nvidia.com/gpu": 1}}})},
    ),
    Refusal(
        "GpusByGpusPerPod",
        "spec.workers",
        "`nvidia.com/gpu` must not be in `resources`: request it with `gpusPerPod`",
        {"workers": {"resources": {"limits": {"cpu": 1, "nvidia.com/gpu": 1}}}},
    ),
)

PROGRAMS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "a script under torchrun, without a template": untrained(
        {
            "gpusPerPod": 8,
            "image": "me/train:1",
            "command": ["torchrun", "train.py"],
            "args": ["--lr=3e-4"],
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "envFrom": [{"secretRef": {"name": "hub"}}],
            "resources": {"limits": {"rdma/hca": 8}, "requests": {"cpu": "16", "memory": "128Gi"}},
        }
    ),
    "a deadline for steps that a program may report": untrained(
        {"image": "me/train:1", "command": ["train"]}, runPolicy={"progressDeadlineSeconds": 600}
    ),
    "a deadline for steps that are read from lines": untrained(
        {"image": "me/train:1", "command": ["train"]},
        progress={"totalSteps": 9, "logRules": [{"pattern": "step (?P<step>[0-9]+)"}]},
        runPolicy={"progressDeadlineSeconds": 600},
    ),
    "exit codes of the trainer": {"runPolicy": _on_exit("In", [7], containerName="trainer")},
    "exit codes of an init container of servers": untrained(
        {"image": "a:1"},
        parameterServers=_fetching("fetch") | {"image": "a:1"},
        runPolicy=_on_exit("NotIn", [7], containerName="fetch"),
    ),
    "training in an image that stands beside the template": {"workers": {"image": "me/trainer:1"}},
    "servers with a command": untrained({"image": "a:1"}, parameterServers={"image": "a:1", "command": ["serve"]}),
}
