"""A node whose death is noticed after the restart that it caused."""

import pytest

from tests.unit.decide.test_failures import own_world, restart, verdict


@pytest.mark.parametrize("backoff", [0, 10])
def test_a_node_whose_death_is_noticed_after_the_restart_was_the_cause_after_all(backoff: int) -> None:
    """A program of one's own says of a lost peer no more than exit code 1."""
    world = (
        own_world(restartBackoffSeconds=backoff).end(0, 1).end(2, 1, at="2026-01-01T12:00:01Z").pass_time(4).settle()
    )
    assert (verdict(world).class_, world.job.status.restarts_since_checkpoint) == ("Program", 1)
    world.pod(1)["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.settle()
    found = verdict(world)
    assert (found.class_, found.pod) == ("NodeLost", "digits-3f9a1-worker-1-a1")
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 0)
    assert "was lost with its node" in world.condition("Restarting")[2]
    world.pass_time(66).settle().run_all()
    assert world.condition("Running")[0] == "True"


def test_a_verdict_that_is_put_right_clears_the_node_that_it_had_blamed() -> None:
    world = own_world(restartBackoffSeconds=0).end(0, 1).end(2, 1, at="2026-01-01T12:00:01Z").pass_time(4)
    restart(world).end(0, 1, at="2026-01-01T12:00:04Z").end(2, 1, at="2026-01-01T12:00:05Z").pass_time(4).settle()
    assert world.job.status.attempts[-1].avoided_nodes == ["node1"]
    silent = world.pod(1)
    silent["spec"]["nodeName"] = "node2"
    silent["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    world.settle()
    assert (verdict(world, 2).class_, verdict(world, 2).node) == ("NodeLost", "node2")
    assert world.job.status.attempts[-1].avoided_nodes == ["node2"]
