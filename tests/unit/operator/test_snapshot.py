"""What a decision sees of a job follows its versions."""

from typing import Any

from disttrain_operator.decide.observed import Job
from disttrain_operator.snapshot import World
from tests.builders import UID, a_raw_job


def seen(world: World, raw: dict[str, Any], version: str) -> Job:
    raw["metadata"]["resourceVersion"] = version
    world.jobs.observe(raw)
    job = world.job(UID)
    assert job is not None
    return job


def test_a_new_status_is_seen_and_the_spec_is_not_read_again() -> None:
    world = World()
    first = seen(world, a_raw_job(), "1")
    second = seen(world, a_raw_job(status={"attempt": 3}), "2")
    assert (second.status.attempt, second.resource_version) == (3, "2")
    assert second.spec is first.spec


def test_a_new_spec_is_read() -> None:
    world = World()
    first = seen(world, a_raw_job(workers={"replicas": 2}), "1")
    second = seen(world, a_raw_job(workers={"replicas": 3}), "2")
    assert first.spec is not None
    assert second.spec is not None
    assert (first.spec.workers.replicas, second.spec.workers.replicas) == (2, 3)


def test_the_problems_of_a_spec_stay_known_and_go_with_it() -> None:
    world = World()
    wrong = {"workers": {"replicas": "two"}}
    assert seen(world, a_raw_job(**wrong), "1").problems
    assert seen(world, a_raw_job(status={"attempt": 0}, **wrong), "2").problems
    assert not seen(world, a_raw_job(), "3").problems
