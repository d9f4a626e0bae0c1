"""Python and the API server refuse the same jobs in the same words, whatever a job looks like."""

from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from disttrain_api import JobSpec
from disttrain_api.rules import RULES
from tests.builders import a_manifest, merge
from tests.integration.test_crd import Jobs, causes
from tests.integration.test_crd import jobs as jobs
from tests.refusals import ACCEPTED, REFUSALS
from tests.soak import SOAK

Raw = dict[str, Any]
CHANGES = [*ACCEPTED.values()] * 2 + [refusal.spec for refusal in REFUSALS]


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Raw]:
    """Objects with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


few = st.integers(1, 4)
SIZES = some(
    workers=some(replicas=few, processesPerPod=few, gpusPerPod=st.sampled_from([2, 4])),
    parallelism=some(
        dataParallelShardDegree=few, tensorParallelDegree=few, pipelineParallelDegree=few, devicesPerProcess=few
    ),
    training=some(
        microBatchSize=few,
        globalBatchSize=st.sampled_from([7, 8, 12, 48, 96]),
        gradientAccumulationSteps=few,
        steps=st.integers(5, 40),
    ),
)


@st.composite
def specs(draw: st.DrawFn) -> Raw:
    """Specs whose fields are right in themselves: what breaks a rule, and what breaks none, laid over one another."""
    spec = a_manifest()["spec"]
    for changes in draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=5)):
        spec = merge(spec, changes)
    sizes = draw(st.just({}) | st.just({}) | SIZES)
    return merge(spec, {part: size for part, size in sizes.items() if part in spec or part == "parallelism"})


def broken_rules(spec: JobSpec) -> set[tuple[str, str]]:
    """(path, sentence) of every rule that Python takes for broken."""
    problems = ((rule.path, rule.problem(spec)) for rule in RULES)
    return {(path, message) for path, message in problems if message is not None}


def test_python_and_the_api_server_refuse_alike(jobs: Jobs) -> None:
    accepted = []

    @settings(
        max_examples=5000 if SOAK else 400,
        deadline=None,
        derandomize=not SOAK,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(spec=specs())
    def is_refused_alike(spec: Raw) -> None:
        try:
            read = JobSpec.model_validate(spec)
        except ValidationError:
            assume(False)
        answer = jobs.create(a_manifest("random") | {"spec": spec}, dry_run=True)
        by_api_server = set(causes(answer)) if answer["kind"] == "Status" else set()
        assert by_api_server == broken_rules(read)
        accepted.append(not by_api_server)

    is_refused_alike()
    # Where nothing is accepted, rules that refuse too much are not found.
    assert 0.1 < sum(accepted) / len(accepted) < 0.6
