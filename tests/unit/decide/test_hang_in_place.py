"""A gang that hangs restarts in place first, as the job asks; its pods are recreated where that does not come about."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.report import PodReport, RankFailure, RestartsInPlace
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, Decision, DeletePod, Order, RestartInPlace
from disttrain_operator.decide.hang_in_place import ORDER_SECONDS
from disttrain_operator.decide.live import Blame, Live, Suspicion
from disttrain_operator.decide.reading import observe
from tests.unit.decide.test_hang import LIMIT, STALL
from tests.unit.decide.world import World, a_running_world

IN_PLACE = LIMIT | {"restartStrategy": "InPlace"}
STOPPED = Blame(1, "is stopped by a signal, and rank 0 waits in f (a:1)", certain=True, awaited=True)
ASTRAY = Blame(1, "is in g (b:1), and 2 others wait, rank 0 in f (a:1)", certain=True)
MUTUAL = Blame(None, "rank 0 waits in f (a:1), and rank 1 waits in g (b:1): they wait for each other", certain=True)
ONCE = RestartsInPlace(count=1, time="2026-01-01T12:00:00Z", failure=RankFailure(rank=1, exit_code=137, signal=9))


def hung(world: World, order: Order | None = None, later: float = 0.0, **changes: Any) -> Decision:
    live = Live(world.pod()["metadata"]["uid"], world.job.status.attempt, None, replace(STALL, blame=STOPPED))
    observed = observe(world.pods.values(), world.gone, (), world.services)
    observed = replace(observed, live=replace(live, **changes), order=order)
    return decide(world.job, observed, world.now + timedelta(seconds=later))


def ordered(decision: Decision) -> RestartInPlace:
    (action,) = decision.actions
    assert isinstance(action, RestartInPlace)
    return action


def is_recreated(decision: Decision) -> bool:
    assert decision.status is not None
    return decision.status.attempt == 2 and any(isinstance(one, DeletePod | CreatePod) for one in decision.actions)


@pytest.fixture
def world() -> World:
    return a_running_world(runPolicy=IN_PLACE)


@pytest.mark.parametrize(
    ("blame", "rank"),
    [(STOPPED, 1), (replace(STOPPED, rank=0), 0), (ASTRAY, None), (MUTUAL, None), (None, None)],
    ids=["the others wait for it", "it is rank 0", "it is in another call", "all wait for each other", "nobody knows"],
)
def test_the_rank_that_others_wait_for_is_killed_alone_and_else_all(
    world: World, blame: Blame | None, rank: int | None
) -> None:
    """Ranks that were in different calls may have received what is not theirs: none of them may leave its state."""
    decision = hung(world, stall=replace(STALL, blame=blame))
    assert ordered(decision) == RestartInPlace(world.pod()["metadata"]["uid"], 1, 0, STALL.step, rank, world.now)
    assert decision.status is not None
    assert (decision.status.attempt, decision.status.restarts, decision.status.phase) == (1, 0, "Running")


def test_the_condition_and_an_event_say_where_the_ranks_were_and_what_follows(world: World) -> None:
    decision = hung(world)
    (event,) = decision.events
    assert (event.reason, event.warning) == ("ProgressDeadlineExceeded", True)
    for sentence in (event.message, decision.message):
        assert "is stopped by a signal, and rank 0 waits in f (a:1)" in sentence
        assert sentence.endswith("its ranks are restarted in place")


@pytest.mark.parametrize(
    ("reason", "generation", "is_said"),
    [("ProgressDeadlineExceeded", 0, True), ("ProgressDeadlineExceeded", 3, False), (None, 0, False)],
    ids=["the order's", "an order for other ranks", "another failure"],
)
def test_the_attempt_says_where_the_ranks_were_that_have_started_again(
    world: World, reason: str | None, generation: int, is_said: bool
) -> None:
    """Red where only an Event does, which is gone after an hour."""
    given = Order(replace(ordered(hung(world)), generation=generation))
    killed = RankFailure(rank=1, exit_code=137, signal=9, reason=reason)
    restarts = RestartsInPlace(count=1, time="2026-01-01T12:00:00Z", failure=killed)
    decision = hung(world, given, stall=None, restarts_in_place=restarts)
    assert decision.status is not None
    said = decision.status.attempts[0].last_restart_in_place
    assert said is not None
    assert said.startswith("rank 1 (pod ")
    assert ("is stopped by a signal, and rank 0 waits in f (a:1)" in said) == is_said


def test_an_order_that_was_given_is_waited_for_once_and_then_the_pods_are_recreated(world: World) -> None:
    given = Order(ordered(hung(world)))
    waits = hung(world, given, later=ORDER_SECONDS - 1)
    assert (waits.actions, waits.requeue_at) == ((), world.now + timedelta(seconds=ORDER_SECONDS))
    late = hung(world, given, later=ORDER_SECONDS)
    assert is_recreated(late)
    assert late.status is not None
    verdict = late.status.attempts[0].verdict
    assert verdict is not None
    assert (verdict.class_, verdict.rank) == ("Hang", 1)
    assert f"no restart in place: it took more than {ORDER_SECONDS} s" in verdict.message


def test_a_refused_order_recreates_the_pods_at_once_and_says_why(world: World) -> None:
    given = Order(ordered(hung(world)), refused="worker 0's agent: it answers 409")
    decision = hung(world, given)
    assert is_recreated(decision)
    assert "no restart in place: worker 0's agent: it answers 409" in decision.events[0].message


@pytest.mark.parametrize(
    "former",
    [{"generation": 0}, {"generation": 1, "pod_uid": "of another life"}],
    ids=["of a former generation", "of a former pod"],
)
def test_a_hang_of_other_ranks_gets_an_order_of_its_own(world: World, former: dict[str, Any]) -> None:
    first = Order(replace(ordered(hung(world)), **former), refused="no")
    second = ordered(hung(world, first, later=10, restarts_in_place=ONCE))
    assert (second.generation, second.at) == (1, world.now + timedelta(seconds=10))


@pytest.mark.parametrize(
    "policy",
    [LIMIT, LIMIT | {"restartStrategy": "Recreate"}],
    ids=["by default", "the pods are to be recreated"],
)
def test_no_order_is_given_where_the_job_does_not_ask_for_it(policy: dict[str, Any]) -> None:
    assert is_recreated(hung(a_running_world(runPolicy=policy)))


@pytest.mark.parametrize(
    ("seconds", "longest", "blame", "policy", "is_over"),
    [
        (60, 12.0, STOPPED, {}, True),
        (60, 12.1, STOPPED, {}, False),
        (599, 120.0, STOPPED, {}, False),
        (600, 120.0, STOPPED, {}, True),
        (59, 0.1, STOPPED, {}, False),
        (60, 12.0, MUTUAL, {}, True),
        (599, 0.1, replace(STOPPED, certain=False), {}, False),
        (599, 0.1, STOPPED, {"restartStrategy": "Recreate"}, False),
    ],
    ids=["five of the longest step", "not yet", "the deadline bounds it", "the deadline", "a minute at least",
         "all wait for each other", "it may be slow", "pods are recreated"],
)  # fmt: skip
def test_a_hang_that_is_certain_has_a_limit_of_the_jobs_own_steps(
    seconds: float, longest: float, blame: Blame, policy: dict[str, Any], is_over: bool
) -> None:
    world = a_running_world(runPolicy=IN_PLACE | policy)
    stall, suspicion = replace(STALL, seconds=seconds, blame=blame), Suspicion(blame, 4.0, 0.1, longest)
    decision = hung(world, stall=stall, suspicion=suspicion)
    assert [type(action) for action in decision.actions] == [RestartInPlace] * is_over
    assert (decision.reason == "ProgressDeadlineExceeded") == is_over


@pytest.mark.parametrize("now", [None, replace(STOPPED, rank=0, certain=False)], ids=["nobody", "one that may be slow"])
def test_a_suspicion_that_was_certain_is_not_enough_where_the_ranks_look_otherwise_now(
    world: World, now: Blame | None
) -> None:
    """Red where a rank that was stopped for a moment, and compiles since, is killed."""
    early = {"stall": replace(STALL, seconds=599, blame=now), "suspicion": Suspicion(STOPPED, 4.0, 0.1, 0.3)}
    assert hung(world, **early).actions == ()


@pytest.mark.parametrize("refused", [None, "worker 0's agent: it answers 409"])
def test_before_the_deadline_no_pod_is_recreated_for_it(world: World, refused: str | None) -> None:
    early = {"stall": replace(STALL, seconds=599, blame=STOPPED), "suspicion": Suspicion(STOPPED, 4.0, 0.1, 0.3)}
    order = ordered(hung(world, **early))
    assert "(progressDeadlineSeconds: 600; its own steps take far less)" in order.why
    given = Order(order, refused=refused)
    waits = hung(world, given, later=ORDER_SECONDS, **early)
    assert (waits.actions, waits.reason) == ((), "AllPodsRunning")
    assert is_recreated(hung(world, given, later=ORDER_SECONDS))


def test_nothing_is_ordered_for_ranks_that_get_on(world: World) -> None:
    assert hung(world, stall=None).actions == ()


def test_a_pod_that_ended_since_its_ranks_could_not_start_again_has_failed_by_a_hang(world: World) -> None:
    """Red where it is taken for a kill from outside, which makes its node suspected."""
    failure = RankFailure(rank=0, exit_code=137, signal=9, reason="ProgressDeadlineExceeded", message="killed")
    world.end(0, 137, report=PodReport(failure=failure))
    decision = world.decide()
    assert decision.status is not None
    verdict = decision.status.attempts[0].verdict
    assert verdict is not None
    assert (verdict.class_, verdict.reason) == ("Hang", "ProgressDeadlineExceeded")
    assert "was killed by its agent, since no rank did a step (progressDeadlineSeconds)" in verdict.message
