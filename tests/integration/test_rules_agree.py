"""Python and the API server refuse the same jobs in the same words, whatever a job looks like."""

from typing import Any

from hypothesis import HealthCheck, given, settings

from disttrain_api import JobSpec
from disttrain_api.rules import RULES
from tests.builders import a_manifest
from tests.integration.drawn import specs
from tests.integration.test_crd import Jobs, causes
from tests.integration.test_crd import jobs as jobs
from tests.soak import SOAK

Raw = dict[str, Any]


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
        answer = jobs.create(a_manifest("random") | {"spec": spec}, dry_run=True)
        by_api_server = set(causes(answer)) if answer["kind"] == "Status" else set()
        assert by_api_server == broken_rules(JobSpec.model_validate(spec))
        accepted.append(not by_api_server)

    is_refused_alike()
    # Where nothing is accepted, rules that refuse too much are not found.
    assert 0.1 < sum(accepted) / len(accepted) < 0.6
