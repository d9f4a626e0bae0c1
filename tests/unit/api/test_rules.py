"""The table of rules: each one refuses what it is about, with its very words, and nothing else."""

import pytest

from disttrain_api import problems
from disttrain_api.names import Env
from disttrain_api.rules import RULES
from disttrain_api.rules.pods import is_operators_variable
from disttrain_api.validate import read_job
from tests.builders import a_manifest
from tests.refusals import ACCEPTED, NAME_REFUSALS, REFUSALS, Refusal


def test_every_rule_has_a_job_that_it_refuses() -> None:
    assert {refusal.rule for refusal in REFUSALS} == {rule.id for rule in RULES}
    assert len({rule.id for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.rule)
def test_a_broken_rule_is_reported_at_its_field_in_its_words(refusal: Refusal) -> None:
    """Red without any of the rules, such as those on reserved labels and annotations."""
    assert [str(found) for found in problems(refusal.manifest)] == [f"{refusal.path}: {refusal.message}"]


@pytest.mark.parametrize(("name", "message"), NAME_REFUSALS.items())
def test_a_name_that_no_pod_can_have_is_refused(name: str, message: str) -> None:
    assert [str(found) for found in problems(a_manifest(name))] == [f"metadata.name: {message}"]


@pytest.mark.parametrize("spec", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_what_breaks_no_rule_is_a_job(spec: dict[str, object]) -> None:
    job, found = read_job(a_manifest(**spec))
    assert job is not None
    assert found == []


@pytest.mark.parametrize("name", [Env.RANK, Env.MASTER_ADDR, Env.CONFIG, Env.PET_NNODES, Env.GRACE_SECONDS])
def test_no_variable_of_the_operator_may_be_set(name: str) -> None:
    assert is_operators_variable(name)


def test_numbers_that_would_overflow_64_bits_are_out_of_bounds() -> None:
    """CEL computes in 64 bits: the bounds of the fields keep every product of the rules within."""
    degrees = {
        "dataParallelReplicateDegree": 100_000,
        "dataParallelShardDegree": 10_000,
        "contextParallelDegree": 1024,
        "tensorParallelDegree": 1024,
        "pipelineParallelDegree": 1024,
    }
    for degree, greatest in degrees.items():
        beyond = problems(a_manifest(parallelism={degree: greatest + 1}))
        assert f"spec.parallelism.{degree}: must be less than or equal to {greatest}, not {greatest + 1}" in {
            str(found) for found in beyond
        }
    product = 1
    for greatest in degrees.values():
        product *= greatest
    most_ranks = 10_000 * 1024
    assert product < 2**63
    assert 1_000_000 * 100_000 * most_ranks < 2**63  # micro batch x accumulation x data-parallel degree
