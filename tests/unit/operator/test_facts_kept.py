"""What was read of jobs is kept within a bound, and a namespace with large jobs costs no other what it has read."""

import gc
import tracemalloc
from typing import Any

import pytest

from disttrain_operator.facts import LEAST_BYTES, Facts
from disttrain_operator.kept_job import keep, read
from disttrain_operator.snapshot import World
from tests.builders import a_raw_job
from tests.unit.decide.test_other_versions import statuses

Raw = dict[str, Any]


def a_template(**container: Any) -> Raw:
    return {"workers": {"template": {"spec": {"containers": [{"name": "trainer", **container}]}}}}


JOBS: dict[str, Raw] = {
    "small": a_raw_job(),
    "runs": a_raw_job(status=statuses()[1]),
    "restarted": a_raw_job(status=statuses()[2]),
    "args": a_raw_job(**a_template(args=["abcdef"] * 48_000)),
    "env": a_raw_job(**a_template(env=[{"name": f"A{number}", "value": "x"} for number in range(16_000)])),
    "tolerations": a_raw_job(workers={"template": {"spec": {"tolerations": [{}] * 49_000}}}),
    "config": a_raw_job(training={"model": {"config": {f"k{number}": number for number in range(4_000)}}}),
    "text": a_raw_job(workers={"template": {"metadata": {"annotations": {"a": "x" * 900_000}}}}),
    "wide text": a_raw_job(workers={"template": {"metadata": {"annotations": {"a": "x" * 400_000 + "\U0001f600"}}}}),
    "status": a_raw_job(status={"mood": [{}] * 200_000}),
}


@pytest.mark.parametrize("raw", JOBS.values(), ids=JOBS)
def test_what_is_read_of_a_job_takes_no_more_than_is_reckoned(raw: Raw) -> None:
    kept = keep(raw)
    gc.collect()
    tracemalloc.start()
    try:
        job = read(kept)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert job.name == "digits"
    assert taken <= LEAST_BYTES + kept["parsed"]


def put(facts: Facts, uid: str, namespace: str, **spec: Any) -> None:
    raw = a_raw_job(uid, **spec)
    raw["metadata"] |= {"uid": uid, "namespace": namespace}
    kept = keep(raw)
    facts.put(kept, read(kept))


LARGE = a_template(args=["abcdef"] * 1_000)


def test_the_namespace_that_has_most_loses_what_was_read_first() -> None:
    facts = Facts(most=500_000)
    for number in range(5):
        put(facts, f"small{number}", "few")
    for number in range(20):
        put(facts, f"large{number}", "many", **LARGE)
    assert facts.total <= 500_000
    assert all(f"small{number}" in facts for number in range(5))
    assert ("large0" in facts, "large19" in facts) == (False, True)


def test_the_one_that_is_about_to_be_looked_at_is_never_forgotten() -> None:
    facts = Facts(most=10)
    put(facts, "a", "one")
    put(facts, "b", "two", **LARGE)
    assert ("a" in facts, "b" in facts) == (False, True)
    facts.forget("b")
    assert (facts.total, len(facts)) == (0, 0)


def test_what_was_forgotten_is_read_again() -> None:
    world = World()
    world._facts = Facts(most=10)
    for uid in ("a", "b"):
        raw = a_raw_job(uid)
        raw["metadata"]["uid"] = uid
        world.jobs.observe(raw)
    for _ in range(2):
        for uid in ("a", "b"):
            job = world.job(uid)
            assert (job.name, len(world._facts)) == (uid, 1)
