"""Jobs for the rules of pods, degrees, batches, optimizers, storage and policies, and how they are refused."""

from collections.abc import Mapping
from typing import Any

from tests.builders import a_claim_template, merge
from tests.refusals.refusal import (
    IMAGE,
    RESERVED_VARIABLES,
    SERVERS,
    WORKERS,
    Refusal,
    own_program,
    pods,
    servers,
    untrained,
)


def placement(**settings: Any) -> dict[str, Any]:
    """Changes of the scheduling policy."""
    return {"runPolicy": {"schedulingPolicy": settings}}


CLAIM = {"claimName": "a-claim"}
PLACEMENT = "spec.runPolicy.schedulingPolicy"
PARALLELISM = "spec.parallelism"
BATCH = "spec.training.globalBatchSize"

IN_PLACE = {"restartStrategy": "InPlace"}
ONE = {"replicas": 1, "processesPerPod": 2}
DRAINED = {"action": "RestartWithoutCounting", "onPodConditions": [{"type": "DisruptionTarget"}]}

PIPEDREAM = {"parallelism": {"pipelineParallelDegree": 2, "pipeline": {"schedule": "PipeDream"}}}

GENERAL_REFUSALS = (
    Refusal(
        "WorldSizeEqualsDegrees",
        PARALLELISM,
        "world size 8 (2 pods x 4 processes) must equal the product of the degrees, which is 6",
        {"workers": pods(2, 4), "parallelism": {"dataParallelReplicateDegree": 6}},
    ),
    Refusal(
        "WorldSizeMultipleOfDegrees",
        PARALLELISM,
        "world size 2 (2 pods x 1 processes) must be a multiple of the product of the degrees, which is 3: every"
        " stage and shard has the same number of replicas",
        {"parallelism": {"tensorParallelDegree": 3}},
    ),
    Refusal(
        "ExpertsDivideRanks",
        f"{PARALLELISM}.expertParallelDegree",
        "`expertParallelDegree` 2 must divide the product of the shard, context and tensor degrees, which is 1: experts"
        " are spread over those ranks; raise `dataParallelShardDegree`",
        {"parallelism": {"expertParallelDegree": 2}, "training": {"model": {"name": "gpt"}, "data": {"name": "text"}}},
    ),
    Refusal(
        "GpusMultipleOfProcesses",
        "spec.workers.gpusPerPod",
        "`gpusPerPod` 8 must be a multiple of `processesPerPod` 3",
        {"workers": {"gpusPerPod": 8, "processesPerPod": 3}},
    ),
    Refusal(
        "GpuResourceNeedsGpus",
        "spec.workers.gpuResource",
        "`gpuResource` needs `gpusPerPod`: set how many each pod gets",
        {"workers": {"gpuResource": "amd.com/gpu"}},
    ),
    Refusal(
        "BatchSizeGiven",
        "spec.training",
        "`microBatchSize` or `globalBatchSize` must be given",
        {"training": {"microBatchSize": None}},
    ),
    Refusal(
        "GlobalBatchMultipleOfAccumulation",
        BATCH,
        "`globalBatchSize` 10 must be a multiple of gradientAccumulationSteps x data-parallel degree x pipeline"
        " microbatches, which is 3 x 2 x 1 = 6",
        {"training": {"microBatchSize": None, "globalBatchSize": 10, "gradientAccumulationSteps": 3}},
    ),
    Refusal(
        "GlobalBatchMultipleOfMicroBatch",
        BATCH,
        "`globalBatchSize` 24 must be a multiple of microBatchSize x data-parallel degree x pipeline microbatches,"
        " which is 16 x 2 x 1 = 32",
        {"training": {"globalBatchSize": 24}},
    ),
    Refusal(
        "GlobalBatchEqualsProduct",
        BATCH,
        "`globalBatchSize` 64 must equal microBatchSize x gradientAccumulationSteps x data-parallel degree x"
        " pipeline microbatches, which is 16 x 3 x 2 x 1 = 96",
        {"training": {"globalBatchSize": 64, "gradientAccumulationSteps": 3}},
    ),
    Refusal(
        "ModelNameOrEntrypoint",
        "spec.training.model",
        "exactly one of `name` and `entrypoint` must be given, none with a task",
        {"training": {"model": {"entrypoint": "mine:build"}}},
    ),
    Refusal(
        "DataNameOrEntrypoint",
        "spec.training.data",
        "exactly one of `name` and `entrypoint` must be given, none with a task",
        {"training": {"data": {"name": None}}},
    ),
    Refusal(
        "MinimumRatioNeedsShape",
        "spec.training.lrSchedule.minimumRatio",
        "`minimumRatio` is a setting of Linear and Cosine, not of Constant: remove it or change `name`",
        {"training": {"lrSchedule": {"minimumRatio": 0.1}}},
    ),
    Refusal(
        "WarmupWithinSteps",
        "spec.training.lrSchedule.warmupSteps",
        "`warmupSteps` 101 must be less than or equal to `steps` 100",
        {"training": {"lrSchedule": {"warmupSteps": 101}}},
    ),
    Refusal(
        "ProfilingWithinSteps",
        "spec.training.profiling",
        "`profiling` ends with step 12 (`firstStep` + `steps` - 1), which must be less than or equal to"
        " `training.steps` 11",
        {"training": {"steps": 11, "profiling": {}}},
    ),
    Refusal(
        "SettingNeedsCrossEntropy",
        "spec.training.loss",
        "`labelSmoothing` is a setting of CrossEntropy, not of MeanSquaredError: remove it or change `name`",
        {
            "training": {
                "loss": {"name": "MeanSquaredError", "labelSmoothing": 0.1},
                "model": {"name": None, "entrypoint": "mine:build"},
                "data": {"name": None, "entrypoint": "mine:data"},
            }
        },
    ),
    Refusal(
        "CheckpointNeedsStorage",
        "spec.training.checkpoint",
        "`training.checkpoint` needs `spec.storage`, which outlives the pods: set it, or remove `checkpoint`",
        {"training": {"checkpoint": {"interval": 10}}},
    ),
    Refusal(
        "OneStorage",
        "spec.storage",
        "exactly one of `claimName`, `volumeClaimTemplate` and `url` must be given",
        {"storage": CLAIM | a_claim_template()},
    ),
    Refusal(
        "RetentionNeedsClaimTemplate",
        "spec.storage.retentionPolicy",
        "`retentionPolicy` needs a claim that the operator creates: set `volumeClaimTemplate`, or remove it",
        {"storage": CLAIM | {"retentionPolicy": {"whenDeleted": "Delete"}}},
    ),
    Refusal(
        "ClaimHasSize",
        "spec.storage.volumeClaimTemplate.spec",
        "a claim needs a size: set `resources.requests.storage`, for example 100Gi",
        {"storage": {"volumeClaimTemplate": {"spec": {"storageClassName": "fast"}}}},
    ),
    *(
        Refusal(
            "ClaimOfOnePod",
            "spec.storage.volumeClaimTemplate.spec.accessModes",
            "a ReadWriteOnce claim serves one pod, and the job has 3 (2 workers + 1 servers): use ReadWriteMany",
            servers() | {"storage": a_claim_template(accessModes=[mode])},
        )
        for mode in ("ReadWriteOnce", "ReadWriteOncePod")
    ),
    *(
        Refusal(
            "ClaimMetadata",
            "spec.storage.volumeClaimTemplate.metadata",
            "labels and annotations that begin with 'disttrain.io/', and the label 'app.kubernetes.io/managed-by',"
            " are set by the operator: remove them",
            {"storage": merge(a_claim_template(), {"volumeClaimTemplate": {"metadata": {kind: {key: "x"}}}})},
        )
        for kind, key in (
            ("labels", "disttrain.io/job-uid"),
            ("labels", "app.kubernetes.io/managed-by"),
            ("annotations", "disttrain.io/job-uid"),
        )
    ),
    Refusal(
        "MaxRestartsNeedsGang",
        "spec.runPolicy.maxRestarts",
        "`maxRestarts` 5 is a setting of restartPolicy Gang, not of Never: remove it or change `restartPolicy`",
        {"runPolicy": {"restartPolicy": "Never", "maxRestarts": 5}},
    ),
    Refusal(
        "FailurePolicyNeedsGang",
        "spec.runPolicy.failurePolicy",
        "`failurePolicy` is a setting of restartPolicy Gang, not of Never: remove it, or change `restartPolicy` (a"
        " last rule with only `action: FailJob` has the same effect as Never)",
        untrained(
            own_program(), runPolicy={"restartPolicy": "Never", "failurePolicy": {"rules": [{"action": "RestartGang"}]}}
        ),
    ),
    *(
        Refusal(
            "InPlaceNeedsAgents",
            "spec.runPolicy.restartStrategy",
            "`restartStrategy` InPlace needs `training` or `workers.command`, restartPolicy Gang and no"
            " `parameterServers`: use Recreate, or change these",
            spec,
        )
        for spec in (
            untrained(own_program(), runPolicy=IN_PLACE),
            {"workers": ONE, "runPolicy": IN_PLACE | {"restartPolicy": "Never"}},
            {
                "workers": ONE,
                "parameterServers": {},
                "parallelism": {"dataParallel": {"mode": "ParameterServer"}},
                "runPolicy": IN_PLACE,
            },
        )
    ),
    *(
        Refusal(
            "InPlaceHidesFailures",
            "spec.runPolicy.failurePolicy",
            "rules see no rank that fails and restarts in place: give each `onPodConditions` alone, or use"
            " `restartStrategy` Recreate",
            {"workers": ONE, "runPolicy": IN_PLACE | {"failurePolicy": {"rules": [DRAINED, rule]}}},
        )
        for rule in (
            {"action": "FailJob"},
            DRAINED | {"signals": [9]},
            DRAINED | {"reasons": ["OOMKilled"]},
            DRAINED | {"onExitCodes": {"operator": "In", "values": [42]}},
        )
    ),
    *(
        Refusal(
            "WorkersFailTogether",
            "spec.runPolicy.failurePolicy",
            "ranks of `training` or InPlace train in step and cannot continue without one of them: set `roles: [ps]` in"
            " rules with RestartPod or Ignore, or use RestartGang",
            spec,
        )
        for spec in (
            {"runPolicy": {"failurePolicy": {"rules": [{"action": "FailJob"}, {"action": "RestartPod"}]}}},
            untrained(
                own_program() | {"command": ["train"]},
                runPolicy=IN_PLACE | {"failurePolicy": {"rules": [DRAINED | {"action": "Ignore"}]}},
            ),
        )
    ),
    Refusal(
        "SuccessOfServersNeedsServers",
        "spec.runPolicy.successPolicy",
        "`successPolicy.role` is ps and the job has no `parameterServers`: add them, or use role worker",
        {"runPolicy": {"successPolicy": {"role": "ps"}}},
    ),
    Refusal(
        "TopologyRequiredOrPreferred",
        f"{PLACEMENT}.topology",
        "exactly one of `required` and `preferred` must be given",
        placement(topology={"required": "a/zone", "preferred": "a/rack"}),
    ),
    Refusal(
        "TimeoutNeedsGateOrCoscheduling",
        f"{PLACEMENT}.timeoutSeconds",
        "`timeoutSeconds` is a setting of Gate and Coscheduling, not of None: remove it or change `gangScheduler`"
        " (`startingDeadlineSeconds` bounds the start of every job)",
        placement(timeoutSeconds=60),
    ),
    Refusal(
        "QueueNeedsKueueOrVolcano",
        f"{PLACEMENT}.queueName",
        "`queueName` is a setting of Kueue and Volcano, not of Gate: remove it or change `gangScheduler`",
        placement(gangScheduler="Gate", queueName="mine"),
    ),
    Refusal(
        "KueueNeedsQueue",
        f"{PLACEMENT}.queueName",
        "`gangScheduler` Kueue needs `queueName`: the name of a LocalQueue in the job's namespace",
        placement(gangScheduler="Kueue"),
    ),
    *(
        refusal
        for role, path, changes in (
            ("Workers", WORKERS, lambda *containers, **pod: {"workers": own_program(*containers, **pod)}),
            ("Servers", SERVERS, servers),
        )
        for refusal in (
            Refusal(
                f"{role}RestartPolicy",
                f"{path}.spec.restartPolicy",
                "`restartPolicy` OnFailure must be Never: the operator restarts all pods of a job together",
                changes(restartPolicy="OnFailure"),
            ),
            *(
                Refusal(
                    f"{role}{name}",
                    f"{path}.spec.{field}",
                    f"`{field}` is set by the operator: remove it",
                    changes(**{field: "mine"}),
                )
                for name, field in (
                    ("Hostname", "hostname"),
                    ("Subdomain", "subdomain"),
                    ("HostnameOverride", "hostnameOverride"),
                )
            ),
            Refusal(
                f"{role}Volumes",
                f"{path}.spec.volumes",
                "volume `disttrain-b` must not begin with 'disttrain-', the prefix of the operator's volumes: rename"
                " it",
                changes(volumes=[{"name": "a", "emptyDir": {}}, {"name": "disttrain-b", "emptyDir": {}}]),
            ),
            Refusal(
                f"{role}Environment",
                f"{path}.spec.containers",
                RESERVED_VARIABLES,
                changes(
                    {"name": "side", "image": "an/image:1", "env": [{"name": "RANK", "value": "0"}]},
                    IMAGE | {"env": [{"name": "MINE"}, {"name": "WORLD_SIZE", "value": "4"}]},
                ),
            ),
        )
    ),
)

NAME_REFUSALS = {
    "a" * 41: "the name has 41 characters and may have at most 40: names of pods and hosts contain it",
    "2nd-run": "'2nd-run' must begin with a lower-case letter, hold lower-case letters, digits and '-' only, and"
    " end with a letter or digit: a Service has this name",
    "a.b": "'a.b' must begin with a lower-case letter, hold lower-case letters, digits and '-' only, and"
    " end with a letter or digit: a Service has this name",
}

GENERAL_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "training with two pods": {},
    "the degree that is the world size": {"parallelism": {"dataParallelReplicateDegree": 2}},
    "degrees of one": {"parallelism": {"tensorParallelDegree": 1, "expertParallelDegree": 1}},
    "a rank per GPU": {"workers": {"gpusPerPod": 8}},
    "four GPUs per rank": {"workers": {"gpusPerPod": 8, "processesPerPod": 2}},
    "GPUs of another make": {"workers": {"gpusPerPod": 1, "gpuResource": "amd.com/gpu"}},
    "batch sizes that fit": {"training": {"globalBatchSize": 32}},
    "a global batch alone": {"training": {"microBatchSize": None, "globalBatchSize": 32}},
    "a micro batch and its repetitions": {"training": {"gradientAccumulationSteps": 7}},
    "a cosine with an end": {"training": {"lrSchedule": {"name": "Cosine", "minimumRatio": 0.1}}},
    "a warm-up to the last step": {"training": {"lrSchedule": {"warmupSteps": 100}}},
    "checkpoints on a claim": {"training": {"checkpoint": {}}, "storage": {"claimName": "mine"}},
    "a claim to make": {"storage": a_claim_template(retain=False, storageClassName="fast")},
    "one pod's claim": {"workers": {"replicas": 1}, "storage": a_claim_template(accessModes=["ReadWriteOnce"])},
    "no restarts, said twice": {"runPolicy": {"restartPolicy": "Never", "maxRestarts": 0}},
    "ranks that restart in place": {"workers": ONE, "runPolicy": IN_PLACE | {"failurePolicy": {"rules": [DRAINED]}}},
    "ranks of several pods that restart in place": {"runPolicy": IN_PLACE},
    "a gang behind the gate": placement(gangScheduler="Gate", timeoutSeconds=60, topology={"required": "a/zone"}),
    "a gang in a queue": placement(gangScheduler="Kueue", queueName="mine"),
    "a topology without a gang": placement(topology={"preferred": "a/rack"}),
    "rules for failures": {
        "runPolicy": {
            "failurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}, "roles": ["worker"]},
                    {"action": "RestartPod", "roles": ["ps"]},
                    {"action": "RestartWithoutCounting", "onPodConditions": [{"type": "DisruptionTarget"}]},
                    {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [0]}},
                ]
            }
        }
    },
    "an image with its own entry point": untrained(own_program()),
    "a command in the default image": untrained(own_program({"name": "trainer", "command": ["a"]})),
    "training in an image of its own": {"workers": own_program(IMAGE)},
    "a command beside the trainer": {"workers": own_program({"name": "side", "command": ["a"]})},
    "servers with a command": servers({"name": "trainer", "command": ["serve"]}),
    "GPUs of the servers": servers(IMAGE | {"resources": {"limits": {"nvidia.com/gpu": 1}}}),
    "the restart policy there is": {"workers": {"template": {"spec": {"restartPolicy": "Never"}}}},
    "other variables": {"workers": own_program(IMAGE | {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]})},
}
