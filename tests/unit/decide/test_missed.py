"""Which pods a gang misses: whose agents are then asked whether anything is there."""

from disttrain_api.names import ExitCode
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.missed import missed
from disttrain_operator.decide.reading import observe
from tests.builders import a_report
from tests.unit.decide.world import World, a_running_world


def a_gang() -> World:
    return a_running_world(workers={"replicas": 3})


def missed_in(world: World, **live: frozenset[int]) -> set[int]:
    """The workers that are missed, by what an agent says."""
    known = Live("uid", world.job.status.attempt, None, **live)
    return {pod.index for pod in missed(observe(world.pods.values(), world.gone).pods, known)}


def test_nobody_is_missed_in_a_gang_that_runs() -> None:
    assert missed_in(a_gang()) == set()


def test_whom_an_agent_waits_for_is_missed() -> None:
    assert missed_in(a_gang(), awaited=frozenset({0}), missing=frozenset({2})) == {0, 2}


def test_whom_an_agent_waits_for_is_not_missed_once_it_has_ended_or_is_being_ended() -> None:
    world = a_gang()
    world.end(1, 137, report=a_report(5)).drain(2, None)
    assert missed_in(world, awaited=frozenset({0, 1, 2})) == {0}


def test_where_all_that_failed_have_lost_a_peer_those_that_run_are_missed() -> None:
    world = a_gang()
    world.end(0, ExitCode.PEER_LOST, report=a_report(5))
    assert missed_in(world) == {1, 2}
    world.end(1, 1, report=a_report(5))
    assert missed_in(world) == set(), "the cause is known"


def test_where_no_agent_of_the_attempt_has_answered_nobody_is_missed() -> None:
    """The operator may hear none of them: a network policy, or an operator outside of the cluster."""
    world = a_gang()
    world.end(0, ExitCode.PEER_LOST, report=a_report(5))
    pods = observe(world.pods.values()).pods
    assert missed(pods, None) == missed(pods, Live("uid", 7, None, awaited=frozenset({1}))) == ()
