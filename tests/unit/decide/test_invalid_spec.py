"""A spec that admission could not refuse, and that cannot run."""

from tests.unit.decide.world import a_world


def test_a_spec_that_cannot_run_fails_with_every_problem_and_makes_no_pod() -> None:
    world = a_world(
        training={"optimizer": {"name": "Adam", "momentum": 0.9}}, parallelism={"dataParallelReplicateDegree": 3}
    ).settle()
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "InvalidSpec")
    assert "world size 2" in message
    assert "momentum" in message
    assert world.pods == {}


def test_a_spec_with_an_unknown_field_is_a_fact_not_an_exception() -> None:
    world = a_world(workers={"replica": 3}).settle()
    assert world.condition("Failed")[1] == "InvalidSpec"
    assert "replica" in world.condition("Failed")[2]
