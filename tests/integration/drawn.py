"""Random specs whose fields are right in themselves: many break a rule, and a fair part breaks none.

A spec is about a few themes, of which it has many fields; of others it has few. So rules of all themes meet, and do so
also in specs that break nothing else.
"""

from collections.abc import Callable
from enum import StrEnum
from math import prod
from typing import Any

from hypothesis import strategies as st

from disttrain_api.parallelism import (
    AllReduce,
    CompressionName,
    DataParallelMode,
    DeviceMode,
    PipelineSchedule,
    PipelineSplit,
    Pushed,
    Synchronization,
)
from disttrain_api.relaxed import OptimizerState
from disttrain_api.training import ActivationCheckpointing, LossName, LrScheduleName, OptimizerName, Precision
from tests.builders import a_claim_template

Raw = dict[str, Any]
Draw = st.DrawFn


def chance(draw: Draw, one_in: int) -> bool:
    """True in one of so many draws."""
    return draw(st.sampled_from([False] * (one_in - 1) + [True]))


@st.composite
def some(draw: Draw, one_in: int = 2, **fields: st.SearchStrategy[Any]) -> Raw:
    """Objects with each of these fields in one of so many draws."""
    return {name: draw(strategy) for name, strategy in fields.items() if chance(draw, one_in)}


def one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


def each(kinds: Any) -> st.SearchStrategy[str]:
    """The values of an enumeration."""
    return st.sampled_from([kind.value for kind in kinds])


class Theme(StrEnum):
    """What a spec may be about."""

    SHARDS = "shards"
    CONTEXT = "context"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    EXPERTS = "experts"
    DEVICES = "devices"
    SUMS = "sums"
    RELAXED = "relaxed"
    SERVERS = "servers"
    BATCH = "batch"
    TRAINING = "training"
    STORAGE = "storage"
    PODS = "pods"
    POLICY = "policy"


Themes = frozenset[Theme]
CUTS = list(Theme)[: list(Theme).index(Theme.BATCH)]
OTHERS = list(Theme)[len(CUTS) :]
OFTEN, RARELY = 3, 40
"""A field is there in one draw of so many."""


def fields_of(theme: Theme, often: int = OFTEN, **fields: st.SearchStrategy[Any]) -> Callable[[Draw, Themes], Raw]:
    """Draws some of these fields: often in specs about the theme, rarely in others."""
    wanted, others = some(often, **fields), some(RARELY, **fields)
    return lambda draw, themes: draw(wanted if theme in themes else others)


small = st.integers(1, 6)

# --- parallelism ---

compressions = st.builds(
    lambda name, more: {"name": name, **more},
    each(CompressionName),
    some(
        5,
        ratio=one_of(0.01, 1),
        rank=st.integers(1, 4),
        warmupSteps=st.integers(0, 10),
        momentumCorrection=one_of(0, 0.9),
    ),
)
pipelines = st.builds(
    lambda common, rare: common | rare,
    some(
        2,
        schedule=each(PipelineSchedule),
        microbatches=one_of(1, 2, 3, 4, 7, 8, 12),
        split=each(PipelineSplit),
    ),
    some(
        6,
        verticalSync=st.booleans(),
        stagesPerRank=st.integers(1, 3),
        layersPerStage=one_of([1, 2], [3, 1, 2, 2], [1, 2, 1]),
    ),
)
period = st.integers(1, 4)
local_sgd = some(
    3,
    period=period,
    warmupSteps=st.integers(0, 9),
    globalPeriod=one_of(2, 4, 8, 12),
    optimizerState=each(OptimizerState),
    outerOptimizer=some(learningRate=one_of(0.7, 1), momentum=one_of(0, 0.9)),
)
bmuf = some(
    3,
    period=period,
    warmupSteps=st.integers(0, 9),
    blockMomentum=one_of(0, 0.5),
    blockLearningRate=st.just(1),
    nesterov=st.booleans(),
    optimizerState=each(OptimizerState),
)
server_settings = some(
    4,
    push=each(Pushed),
    synchronization=each(Synchronization),
    staleness=st.integers(0, 4),
    stalenessAwareRate=st.booleans(),
    snapshotInterval=st.integers(1, 9),
    groupReduce=st.just("WithinGroup"),
)
DEGREES = {
    Theme.SHARDS: "dataParallelShardDegree",
    Theme.CONTEXT: "contextParallelDegree",
    Theme.TENSOR: "tensorParallelDegree",
    Theme.PIPELINE: "pipelineParallelDegree",
    Theme.EXPERTS: "expertParallelDegree",
    Theme.DEVICES: "devicesPerProcess",
}
OWN_SETTINGS = {
    "LocalSGD": ("localSGD", local_sgd),
    "BMUF": ("bmuf", bmuf),
    "ParameterServer": ("parameterServer", server_settings),
}
MODES = {Theme.RELAXED: one_of("LocalSGD", "BMUF"), Theme.SERVERS: st.just("ParameterServer")}
any_mode = each(DataParallelMode)
degree = one_of(2, 2, 2, 1, 3)
draw_sums = fields_of(
    Theme.SUMS,
    allReduce=each(AllReduce),
    compression=compressions,
    syncBatchNorm=st.booleans(),
    staticGraph=st.booleans(),
)
draw_tensor = fields_of(Theme.TENSOR, sequenceParallel=st.booleans(), vocabularyParallel=st.booleans())
draw_pipeline = fields_of(Theme.PIPELINE, 1, pipeline=pipelines)
draw_devices = fields_of(Theme.DEVICES, deviceMode=each(DeviceMode))
other_degrees = some(RARELY, dataParallelReplicateDegree=small)


def draw_data_parallel(draw: Draw, themes: Themes) -> Raw:
    """`dataParallel`: mostly with the settings of its mode, and of no other."""
    found = draw_sums(draw, themes)
    for theme, modes in MODES.items():
        if theme in themes:
            found["mode"] = draw(modes)
    if chance(draw, RARELY):
        found["mode"] = draw(any_mode)
    for mode, (name, settings) in OWN_SETTINGS.items():
        if chance(draw, 2 if found.get("mode") == mode else RARELY):
            found[name] = draw(settings)
    return found


def draw_parallelism(draw: Draw, themes: Themes) -> Raw:
    """`parallelism`: mostly the degrees of the themes."""
    found: Raw = draw(other_degrees)
    for theme, name in DEGREES.items():
        if theme in themes or chance(draw, RARELY):
            found[name] = draw(degree)
    found |= draw_tensor(draw, themes) | draw_pipeline(draw, themes) | draw_devices(draw, themes)
    exchange = draw_data_parallel(draw, themes)
    return found | ({"dataParallel": exchange} if exchange else {})


# --- pods ---

environments = st.lists(
    st.fixed_dictionaries({"name": one_of("RANK", "DISTTRAIN_LATER", "MINE", "YOURS")}),
    max_size=3,
    unique_by=lambda entry: entry["name"],
)
resources = some(
    limits=st.dictionaries(one_of("nvidia.com/gpu", "amd.com/gpu", "cpu"), st.just(1)),
    requests=st.dictionaries(one_of("nvidia.com/gpu", "cpu"), st.just("500m")),
)
containers = st.lists(
    st.builds(
        lambda name, more: {"name": name, **more},
        one_of("trainer", "side"),
        some(
            4,
            image=one_of("an/image:1", ""),
            command=one_of([], ["run"]),
            args=one_of([], ["now"]),
            env=environments,
            resources=resources,
        ),
    ),
    max_size=2,
    unique_by=lambda container: container["name"],
)
OTHER_PODS = {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "a/zone"}]}
own_names = one_of("mine", "disttrain.io/role", "disttrain.io/released-at", "app.kubernetes.io/managed-by")
claims = some(
    2, labels=st.dictionaries(own_names, st.just("x"), max_size=1), annotations=st.dictionaries(own_names, st.just("x"))
)
templates = some(
    2,
    metadata=some(
        2, labels=st.dictionaries(own_names, st.just("x")), annotations=st.dictionaries(own_names, st.just("x"))
    ),
    spec=some(
        4,
        containers=containers,
        initContainers=st.just([{"name": "first", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]),
        restartPolicy=one_of("Never", "Always"),
        hostname=st.just("mine"),
        priorityClassName=one_of("", "high"),
        volumes=st.one_of(
            one_of([], [{"name": "disttrain-x"}], [{"name": "mine"}]),
            claims.map(
                lambda metadata: [
                    {"name": "mine", "ephemeral": {"volumeClaimTemplate": {"metadata": metadata, "spec": {}}}}
                ]
            ),
        ),
        affinity=one_of({}, {"podAffinity": {}}, {"podAffinity": OTHER_PODS}, {"podAntiAffinity": OTHER_PODS}),
        topologySpreadConstraints=one_of(
            [], [{"maxSkew": 1, "topologyKey": "a/zone", "whenUnsatisfiable": "DoNotSchedule"}]
        ),
    ),
)
beside: dict[str, st.SearchStrategy[Any]] = {
    "image": st.just("an/image:1"),
    "command": st.just(["run"]),
    "args": st.just(["now"]),
    "env": environments,
    "resources": resources,
}
draw_beside = fields_of(Theme.PODS, 8, **beside)
draw_pods = fields_of(
    Theme.PODS,
    2,
    gpusPerPod=one_of(1, 2, 4, 8),
    gpuResource=one_of("nvidia.com/gpu", "amd.com/gpu"),
    template=templates,
)
draw_template = fields_of(Theme.PODS, 2, template=templates)
own_program: Raw = {"template": {"spec": {"containers": [{"name": "trainer", "image": "an/image:1"}]}}}


def draw_workers(draw: Draw, themes: Themes, product: int) -> Raw:
    """`workers`: mostly as many ranks as the degrees want, or a multiple."""
    ranks = draw(small) if chance(draw, 10) else product * draw(one_of(2, 1, 4))
    processes = draw(st.sampled_from([size for size in (1, 2, 3, 4, ranks) if ranks % size == 0]))
    found: Raw = {"replicas": ranks // processes} | ({"processesPerPod": processes} if processes > 1 else {})
    return found | draw_pods(draw, themes) | draw_beside(draw, themes)


# --- training ---

OWN = {"entrypoint": "mine:build"}
models = one_of({"name": "mlp"}, {"name": "gpt"}, {"name": "gpt"}, {"name": "resnet"}, OWN, OWN)
data = one_of({"name": "text"}, {"name": "digits"}, OWN)
draw_batch = fields_of(Theme.BATCH, globalBatchSize=one_of(8, 12, 48, 96, 7), gradientAccumulationSteps=small)
draw_training = fields_of(
    Theme.TRAINING,
    optimizer=some(
        4,
        name=each(OptimizerName),
        momentum=one_of(0, 0.9),
        nesterov=st.booleans(),
        beta1=st.just(0.9),
        beta2=st.just(0.9),
        epsilon=st.just(1e-5),
    ),
    lrSchedule=some(2, name=each(LrScheduleName), warmupSteps=one_of(0, 3, 9, 30), minimumRatio=st.just(0.1)),
    loss=some(2, name=each(LossName), labelSmoothing=st.just(0.1)),
    maxGradientNorm=st.just(1),
    precision=each(Precision),
    activationCheckpointing=each(ActivationCheckpointing),
    offload=some(2, parameters=st.booleans(), activations=st.booleans()),
    compile=st.booleans(),
    preflight=st.booleans(),
    profiling=some(2, firstStep=one_of(2, 5, 30), steps=st.integers(1, 10)),
)
draw_meta_device = fields_of(Theme.TRAINING, metaDevice=st.just(True))
draw_checkpoints = fields_of(
    Theme.STORAGE,
    checkpoint=some(2, interval=one_of(1, 2, 4, 5), keepBest=st.integers(1, 3), bestMetric=one_of("Loss", "Accuracy")),
    evaluation=some(2, interval=one_of(1, 2, 4), batchSize=small),
)
steps = st.integers(5, 40)


def draw_trained(draw: Draw, themes: Themes) -> Raw:
    """`training`: mostly with one batch size."""
    found = {
        "steps": draw(steps),
        "model": draw(models) | draw_meta_device(draw, themes),
        "data": draw(data),
    }
    for part in ("model", "data"):
        if chance(draw, RARELY):
            found[part] = draw(one_of({}, found[part] | OWN))
    if not chance(draw, 3 if Theme.BATCH in themes else RARELY):
        found["microBatchSize"] = draw(small)
    return found | draw_batch(draw, themes) | draw_training(draw, themes) | draw_checkpoints(draw, themes)


# --- everything else ---

storages = st.builds(
    lambda place, settings: place | settings,
    one_of(
        {"claimName": "a"},
        a_claim_template(),
        a_claim_template(accessModes=["ReadWriteOnce"], storageClassName="fast"),
        {"url": "s3://a"},
        {},
        {"claimName": "a", "url": "s3://a"},
    ),
    some(4, retentionPolicy=one_of({}, {"whenDeleted": "Delete"})),
)
draw_storage = fields_of(Theme.STORAGE, storage=storages)
exit_codes = [{"operator": word, "values": [0, 7]} for word in ("In", "NotIn")]
exit_codes += [{"operator": "In", "values": [7], "containerName": name} for name in ("trainer", "fetch")]
failure_rules = st.lists(
    st.builds(
        lambda action, more: {"action": action, **more},
        one_of("FailJob", "RestartGang", "RestartPod", "Ignore"),
        some(2, roles=one_of(["ps"], ["worker"], ["ps", "worker"]), onExitCodes=one_of(*exit_codes)),
    ),
    min_size=1,
    max_size=2,
)
draw_policy = fields_of(
    Theme.POLICY,
    2,
    restartPolicy=one_of("Gang", "Never"),
    maxRestarts=one_of(0, 3, 5),
    failurePolicy=st.fixed_dictionaries({"rules": failure_rules}),
    successPolicy=st.fixed_dictionaries({"role": one_of("worker", "ps")}),
    disruptionBudget=st.fixed_dictionaries({"minAvailable": small}),
    schedulingPolicy=some(
        3,
        gangScheduler=one_of("None", "Gate", "Kueue", "Volcano", "Coscheduling"),
        queueName=st.just("a-queue"),
        timeoutSeconds=st.just(60),
        topology=some(2, required=st.just("a/zone"), preferred=st.just("a/rack")),
        priorityClassName=one_of("high", "low"),
    ),
)
any_themes = st.builds(lambda *drawn: frozenset(drawn), *map(st.sampled_from, (CUTS, CUTS, OTHERS)))


@st.composite
def specs(draw: Draw) -> Raw:
    """`spec`: mostly trains, and mostly has servers where its mode needs them."""
    themes = draw(any_themes)
    if Theme.EXPERTS in themes:
        # Their degree is carved out of others.
        themes |= {Theme.SHARDS}
    parallelism = draw_parallelism(draw, themes)
    product = prod(parallelism.get(name, 1) for name in list(DEGREES.values())[:4])  # factors of the world size
    found: Raw = {"workers": draw_workers(draw, themes, product), "runPolicy": draw_policy(draw, themes)}
    found |= {"parallelism": parallelism} if parallelism else {}
    trains = not chance(draw, 8 if Theme.PODS in themes else RARELY)
    if trains:
        found["training"] = draw_trained(draw, themes)
    elif not chance(draw, 4):
        found["workers"] |= own_program
    with_servers = parallelism.get("dataParallel", {}).get("mode") == "ParameterServer" if trains else chance(draw, 2)
    if with_servers != chance(draw, 8 if Theme.PODS in themes else RARELY):
        found["parameterServers"] = {"replicas": draw(small)} | draw_template(draw, themes) | draw_beside(draw, themes)
        if not trains and not chance(draw, 4):
            found["parameterServers"] |= own_program
    if "checkpoint" in found.get("training", {}) and not chance(draw, 10):
        found["storage"] = {"claimName": "a-claim"}
    return found | draw_storage(draw, themes)
