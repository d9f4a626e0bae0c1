"""Any manifest is refused with the name of a field, or its job runs or fails with a reason; the operator stays calm."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from disttrain_api import problems
from disttrain_operator.decide.waiting import USUAL_REASONS
from tests.integration.generated import specs
from tests.integration.kubelet import Kubelet, succeeds
from tests.integration.operator_process import JOBS, OperatorProcess, Team, eventually, running_operator
from tests.soak import SOAK
from tools.cluster.api import Answer
from tools.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.timeout(3600)

Raw = dict[str, Any]
NUMBERS = itertools.count()
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.fixture(scope="module")
def operator(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[OperatorProcess, Team]]:
    flags = (tmp_path_factory.mktemp("operator"), "--trainer-image=trainer:test")
    with Kubelet(control_plane, succeeds), running_operator(control_plane, *flags) as operator:
        yield operator, Team(control_plane.api, "fuzz")


def manifest(spec: Raw) -> Raw:
    name = f"job-{next(NUMBERS)}"
    metadata = {"name": name, "namespace": "fuzz"}
    return {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": metadata, "spec": spec}


def post(team: Team, job: Raw, *, dry_run: bool = False) -> Answer:
    dry = "&dryRun=All" if dry_run else ""
    answer: Answer = eventually(lambda: team.api.ask("POST", f"{JOBS.format('fuzz')}?fieldValidation=Strict{dry}", job))
    return answer


def names_a_field(refusal: Raw) -> bool:
    """Whether a user knows where to look."""
    causes = (refusal.get("details") or {}).get("causes") or []
    if causes:
        # Beside them it says, without a field, that its rules were not asked.
        return any(cause.get("field", "").startswith(("spec", "metadata")) for cause in causes)
    return '"spec.' in refusal["message"] or "spec." in refusal["message"]


@settings(max_examples=2_000 if SOAK else 250, deadline=None, derandomize=not SOAK, suppress_health_check=CHECKS)
@given(spec=specs())
def test_validate_and_the_api_server_agree(operator: tuple[OperatorProcess, Team], spec: Raw) -> None:
    _, team = operator
    job = manifest(spec)
    answer = post(team, job, dry_run=True)
    found = problems(job)
    if answer.status == 201:
        stored = answer.json()
        # What the API server lets in, and validate refuses, is refused again by the operator, in validate's words.
        refused_later = {str(problem) for problem in problems({**job, "spec": stored["spec"]})}
        unseen = [str(problem) for problem in found if str(problem) not in refused_later]
        assert unseen == [] or all(_is_of_the_text(problem) for problem in unseen), (unseen, spec)
    else:
        assert names_a_field(answer.json()), answer.body
        assert found, (answer.json()["message"], json.dumps(spec))


def _is_of_the_text(problem: str) -> bool:
    """What only a reader of the manifest's text can see: the API server drops keys without a value."""
    return "has no value" in problem


def came_to_something(job: Raw) -> bool:
    """The job has ended, is suspended, or says why it does not run."""
    conditions = {entry["type"]: entry for entry in (job.get("status") or {}).get("conditions", [])}
    if any(conditions.get(type_, {}).get("status") == "True" for type_ in ("Finished", "Suspended")):
        return True
    running = conditions.get("Running", {"status": "Unknown", "reason": ""})
    return running["status"] == "False" and running["reason"] not in {*USUAL_REASONS, "CreatingPods"}


@settings(max_examples=60 if SOAK else 12, deadline=None, derandomize=not SOAK, suppress_health_check=CHECKS)
@given(batch=st.lists(specs(), min_size=5, max_size=8))
def test_every_job_comes_to_something(operator: tuple[OperatorProcess, Team], batch: list[Raw]) -> None:
    process, team = operator
    jobs = [manifest(spec) for spec in batch]
    let_in = [job["metadata"]["name"] for job in jobs if post(team, job).status == 201]

    def undecided() -> list[Raw]:
        answers = (team.api.ask("GET", f"{JOBS.format('fuzz')}/{name}") for name in let_in)
        # A finished job may have had its time: the operator has deleted it then.
        return [job for answer in answers if answer.status != 404 and not came_to_something(job := answer.json())]

    eventually(lambda: not undecided(), undecided, pause=0.1)
    for name in let_in:
        deleted = team.api.ask("DELETE", f"{JOBS.format('fuzz')}/{name}")
        assert deleted.status in (200, 404), deleted.body[:500]
    assert "Traceback" not in process.log(), process.log()[-5000:]
