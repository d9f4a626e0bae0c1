"""Jobs whose parameters lie on servers and that cannot be, and some that can."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.models import RESNET
from tests.refusals.refusal import Refusal, own_program, pods, untrained

DATA_PARALLEL = "spec.parallelism.dataParallel"


def on_servers(parallelism: Mapping[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    """The part of a spec that lays the parameters onto two servers."""
    mode: dict[str, Any] = {"mode": "ParameterServer"} | ({"parameterServer": settings} if settings else {})
    given = dict(parallelism or {})
    mode |= given.pop("dataParallel", {})
    return {"parameterServers": {"replicas": 2}, "parallelism": {"dataParallel": mode, **given}}


def with_other(setting: str, changes: Mapping[str, Any]) -> Refusal:
    """A setting that conflicts with servers."""
    return Refusal(
        "ServersWithOthers",
        f"{DATA_PARALLEL}.mode",
        f"`mode` ParameterServer conflicts with `{setting}`, which it does not support: remove one of the two",
        changes,
    )


SERVER_REFUSALS = (
    *(
        Refusal(
            "GroupsWithServers",
            "spec.training.optimizer",
            "`groups` and `weightDecayOn` select parameters by name and shape, which servers do not know: remove them,"
            " or the mode ParameterServer",
            on_servers() | {"training": {"optimizer": optimizer}},
        )
        for optimizer in ({"weightDecayOn": "Matrices"}, {"groups": [{"pattern": "head.*", "learningRateFactor": 2}]})
    ),
    *(
        Refusal(
            "ModeNeedsServers",
            f"{DATA_PARALLEL}.mode",
            "`mode` ParameterServer needs `spec.training` and `spec.parameterServers`, whose `replicas` says how many"
            " servers hold the parameters: add them, or use AllReduce",
            {**changes, "parallelism": {"dataParallel": {"mode": "ParameterServer"}}},
        )
        for changes in ({}, untrained(own_program()), untrained(own_program(), parameterServers=own_program()))
    ),
    Refusal(
        "ServersNeedMode",
        "spec.parameterServers",
        "`parameterServers` beside `training` need `parallelism.dataParallel.mode` ParameterServer: set it, or remove"
        " `parameterServers`",
        {"parameterServers": {"replicas": 2}},
    ),
    Refusal(
        "ServersOneProgram",
        "spec.parameterServers",
        "`spec.training` decides what the servers' container `trainer` runs, so it may have no `command` and no `args`:"
        " remove them, or `spec.training`",
        {**on_servers(), "parameterServers": own_program({"name": "trainer", "command": ["serve"]})},
    ),
    *(
        Refusal(
            "CutModelsNeedGroups",
            "spec.parallelism",
            "with `mode` ParameterServer ranks can share a model only where the ranks of a pod are one worker: set"
            " `parameterServer.groupReduce` WithinGroup, or set the shard, tensor and pipeline degrees to 1",
            {"workers": pods(2, 2), **on_servers({degree: 2}, **settings)},
        )
        for degree, settings in (
            ("dataParallelShardDegree", {}),
            ("tensorParallelDegree", {"synchronization": "Async"}),
            ("pipelineParallelDegree", {}),
        )
    ),
    *(
        Refusal(
            "GroupsArePods",
            "spec.parallelism",
            "`groupReduce` WithinGroup: ranks that share a model must be in one pod, so the processes per pod,"
            f" {processes}, must be a multiple of the product of the degrees, which is {product}: set"
            " `workers.processesPerPod`",
            {"workers": pods(4, processes), **on_servers(degrees, groupReduce="WithinGroup")},
        )
        for processes, product, degrees in (
            (2, 4, {"tensorParallelDegree": 2, "pipelineParallelDegree": 2}),
            (3, 2, {"dataParallelShardDegree": 2}),
        )
    ),
    Refusal(
        "GroupsHaveRanks",
        f"{DATA_PARALLEL}.parameterServer.groupReduce",
        "`groupReduce` WithinGroup sums over the ranks of a pod, and there is one: set `workers.processesPerPod`,"
        " or remove it",
        on_servers(groupReduce="WithinGroup"),
    ),
    Refusal(
        "GroupsPushGradients",
        f"{DATA_PARALLEL}.parameterServer.groupReduce",
        "`groupReduce` sums gradients, and with `push` Parameters each rank updates: use `push` Gradients, or remove"
        " `groupReduce`",
        {"workers": pods(2, 2), **on_servers(groupReduce="WithinGroup", push="Parameters")},
    ),
    with_other(
        "expertParallelDegree",
        {
            "workers": pods(2, 2),
            "training": {"model": {"entrypoint": "a:b", "name": None}},
            **on_servers({"dataParallelShardDegree": 2, "expertParallelDegree": 2}, groupReduce="WithinGroup"),
        },
    ),
    with_other("devicesPerProcess", on_servers({"devicesPerProcess": 2})),
    with_other("allReduce", on_servers({"dataParallel": {"allReduce": "Ring"}})),
    with_other("syncBatchNorm", {**on_servers({"dataParallel": {"syncBatchNorm": True}}), "training": RESNET}),
    with_other("offload.parameters", {**on_servers(), "training": {"offload": {"parameters": True}}}),
    with_other("precision: FP16", {**on_servers(), "training": {"precision": "FP16"}}),
    *(
        with_other(f"optimizer.name: {name}", {**on_servers(), "training": {"optimizer": {"name": name}}})
        for name in ("Adafactor", "Muon")
    ),
    Refusal(
        "ServersWithClipping",
        "spec.training.maxGradientNorm",
        "`maxGradientNorm` conflicts with `synchronization` Sync: each server sees only its part of the gradient;"
        " use Async or BoundedStaleness, where workers clip what they push",
        {**on_servers(), "training": {"maxGradientNorm": 1.0}},
    ),
    Refusal(
        "ServersWithPreflight",
        "spec.training.preflight",
        "`preflight` checks links between ranks, and with `mode` ParameterServer workers send to servers:"
        " remove it, or use AllReduce",
        {**on_servers(), "training": {"preflight": True}},
    ),
    Refusal(
        "ServersWithDataWorkers",
        "spec.training.dataWorkers",
        "`dataWorkers` conflict with `mode` ParameterServer, where a worker gets its samples when a step begins:"
        " remove it, or use AllReduce",
        {**on_servers(), "training": {"dataWorkers": 2}},
    ),
    Refusal(
        "PowerSgdOnServers",
        f"{DATA_PARALLEL}.compression",
        "compression PowerSGD conflicts with `mode` ParameterServer: it needs whole matrices and an all-reduce, and"
        " servers hold ranges of numbers; use another compression, for example TopK",
        on_servers({"dataParallel": {"compression": {"name": "PowerSGD"}}}),
    ),
    Refusal(
        "CompressionOfPushedParameters",
        f"{DATA_PARALLEL}.compression",
        "`compression` conflicts with `push` Parameters: what it leaves out of the parameters would stay in the"
        " optimizer's state; use `push` Gradients, or remove `compression`",
        on_servers({"dataParallel": {"compression": {"name": "Int8"}}}, push="Parameters"),
    ),
    Refusal(
        "SettingsOfServersNeedMode",
        f"{DATA_PARALLEL}.parameterServer",
        "`parameterServer` has settings of `mode` ParameterServer: use this mode, or remove them",
        {"parallelism": {"dataParallel": {"parameterServer": {"synchronization": "Async"}}}},
    ),
    Refusal(
        "WorkersOfServersComeBack",
        "spec.runPolicy.failurePolicy",
        "no other worker can replace worker 0, the leader: set `roles: [ps]` in rules with Ignore, or use RestartPod,"
        " with which the others continue until it is back",
        {**on_servers(), "runPolicy": {"failurePolicy": {"rules": [{"action": "Ignore"}]}}},
    ),
    Refusal(
        "SuccessOfServersOfTraining",
        "spec.runPolicy.successPolicy",
        "`successPolicy.role` ps conflicts with `training`, whose servers run until the workers are done: use role"
        " worker",
        {**on_servers(), "runPolicy": {"successPolicy": {"role": "ps"}}},
    ),
    *(
        Refusal(
            "SettingOfAnotherSynchronization",
            f"{DATA_PARALLEL}.parameterServer",
            f"`{setting}` is not a setting of `synchronization` {synchronization}: remove it, or change"
            " `synchronization`",
            {**on_servers(synchronization=synchronization, **{setting: value}), "storage": {"claimName": "a-claim"}},
        )
        for synchronization, setting, value in (
            ("Async", "staleness", 2),
            ("Sync", "staleness", 2),
            ("Sync", "stalenessAwareRate", True),
            ("Sync", "snapshotInterval", 9),
        )
    ),
    *(
        Refusal(
            "SnapshotsNeedVolume",
            f"{DATA_PARALLEL}.parameterServer.snapshotInterval",
            "`snapshotInterval` needs a volume in `spec.storage`: add `claimName` or"
            " `volumeClaimTemplate`, or remove the interval",
            {**on_servers(synchronization="Async", snapshotInterval=9), **storage},
        )
        for storage in ({}, {"storage": {"url": "s3://bucket"}})
    ),
)

SERVERS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "parameters on servers": on_servers(),
    "updates as they arrive": {
        **on_servers(synchronization="Async", stalenessAwareRate=True),
        "training": {"maxGradientNorm": 1.0},
    },
    "pods of replicas that push once": {"workers": pods(2, 2), **on_servers(groupReduce="WithinGroup")},
    "updates of a bounded age": on_servers(synchronization="BoundedStaleness", staleness=0),
}
