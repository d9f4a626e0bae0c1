"""Python and the API server refuse the same jobs in the same words, whatever a job looks like."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disttrain_api import JobSpec
from disttrain_api.rules import RULES
from tests.builders import a_manifest
from tests.integration.test_crd import Jobs, causes
from tests.integration.test_crd import jobs as jobs
from tests.soak import SOAK

Raw = dict[str, Any]


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Raw]:
    """Objects with some of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


small = st.integers(1, 6)
degrees = ("Replicate", "Shard")
others = ("context", "tensor", "pipeline", "expert")

code = some(name=st.just("mlp"), entrypoint=st.just("mine:build"))
compressions = st.fixed_dictionaries(
    {"name": st.sampled_from(["BF16", "Int8", "OneBit", "TopK", "RandomK", "PowerSGD"])},
    optional={
        "ratio": st.sampled_from([0.01, 1]),
        "rank": st.integers(1, 4),
        "warmupSteps": st.integers(0, 10),
        "momentumCorrection": st.sampled_from([0, 0.9]),
    },
)
containers = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["trainer", "side"])},
        optional={
            "image": st.sampled_from(["an/image:1", ""]),
            "command": st.sampled_from([[], ["run"]]),
            "args": st.sampled_from([[], ["now"]]),
            "env": st.lists(
                st.fixed_dictionaries({"name": st.sampled_from(["RANK", "DISTTRAIN_CONFIG", "MINE"])}),
                max_size=3,
                unique_by=lambda entry: entry["name"],
            ),
            "resources": some(
                limits=st.dictionaries(st.sampled_from(["nvidia.com/gpu", "amd.com/gpu", "cpu"]), st.just(1)),
                requests=st.dictionaries(st.sampled_from(["nvidia.com/gpu", "cpu"]), st.just("500m")),
            ),
        },
    ),
    max_size=2,
    unique_by=lambda container: container["name"],
)
templates = some(
    metadata=some(
        labels=st.dictionaries(st.sampled_from(["mine", "disttrain.io/role", "disttrain.io/index"]), st.just("x"))
    ),
    spec=some(
        containers=containers,
        initContainers=st.just([{"name": "first", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]),
        restartPolicy=st.sampled_from(["Never", "Always"]),
        hostname=st.just("mine"),
        priorityClassName=st.sampled_from(["", "high"]),
        volumes=st.sampled_from([[], [{"name": "disttrain-x"}], [{"name": "mine"}]]),
    ),
)
trainings = st.fixed_dictionaries(
    {"steps": st.integers(1, 20), "model": code, "data": some(entrypoint=st.just("mine:data"), name=st.just("text"))},
    optional={
        "microBatchSize": small,
        "globalBatchSize": st.integers(1, 60),
        "gradientAccumulationSteps": small,
        "optimizer": some(
            name=st.sampled_from(["SGD", "Adam", "AdamW"]),
            momentum=st.sampled_from([0, 0.9]),
            nesterov=st.booleans(),
            beta1=st.just(0.9),
            beta2=st.just(0.9),
            epsilon=st.just(1e-5),
        ),
        "lrSchedule": some(
            name=st.sampled_from(["Constant", "Linear", "Cosine"]),
            warmupSteps=st.integers(0, 30),
            minimumRatio=st.just(0.1),
        ),
        "loss": some(name=st.sampled_from(["CrossEntropy", "MeanSquaredError"]), labelSmoothing=st.just(0.1)),
        "checkpoint": st.just({}),
    },
)
specs = st.fixed_dictionaries(
    {
        "workers": some(
            replicas=small,
            processesPerPod=small,
            gpusPerPod=st.integers(1, 8),
            gpuResource=st.sampled_from(["nvidia.com/gpu", "amd.com/gpu"]),
            template=templates,
        )
    },
    optional={
        "parallelism": some(
            **{f"dataParallel{degree}Degree": small for degree in degrees},
            **{f"{degree}ParallelDegree": st.integers(1, 2) for degree in others},
            dataParallel=some(
                mode=st.sampled_from(["AllReduce", "ParameterServer"]),
                allReduce=st.sampled_from(["Backend", "Ring", "Central"]),
                compression=compressions,
            ),
        ),
        "training": trainings,
        "parameterServers": some(replicas=small, template=templates),
        "storage": some(
            claimName=st.just("a-claim"),
            size=st.just("1Gi"),
            storageClassName=st.just("fast"),
            accessMode=st.sampled_from(["ReadWriteOnce", "ReadWriteMany"]),
            retain=st.booleans(),
        ),
        "runPolicy": some(
            restartPolicy=st.sampled_from(["Gang", "Never"]),
            maxRestarts=st.sampled_from([0, 3, 5]),
            failurePolicy=some(rules=st.just([{"action": "RestartPod"}])).filter(bool),
            disruptionBudget=st.fixed_dictionaries({"minAvailable": small}),
            schedulingPolicy=some(
                gang=st.sampled_from(["None", "Gate", "Kueue", "Volcano", "Coscheduling"]),
                queueName=st.just("a-queue"),
                timeoutSeconds=st.just(60),
                topology=some(required=st.just("a/zone"), preferred=st.just("a/rack")),
                priorityClassName=st.sampled_from(["high", "low"]),
            ),
        ),
    },
)


def broken_rules(spec: JobSpec) -> set[tuple[str, str]]:
    """(path, sentence) of every rule that Python takes for broken."""
    said = ((rule.path, rule.problem(spec)) for rule in RULES)
    return {(path, message) for path, message in said if message is not None}


@settings(
    max_examples=5000 if SOAK else 300,
    deadline=None,
    derandomize=not SOAK,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=specs)
def test_python_and_the_api_server_refuse_alike(jobs: Jobs, spec: Raw) -> None:
    job = a_manifest("random") | {"spec": spec}
    answer = jobs.create(job, dry_run=True)
    by_api_server = set(causes(answer)) if answer["kind"] == "Status" else set()
    assert by_api_server == broken_rules(JobSpec.model_validate(spec))
