"""One of several replicas acts, whatever the network and the clocks do; and the next one takes over."""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from disttrain_operator.kube.client import Client
from disttrain_operator.kube.elections import terms_of
from disttrain_operator.kube.errors import StandingBy, Unavailable
from disttrain_operator.kube.lease import Election, Lease, LeaseAction, ObservedLease, Terms, next_action, updated
from disttrain_operator.leadership import Leadership
from tests.suites import examples
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.lease_world import STEP, World

TERMS = Terms()


@pytest.mark.parametrize(
    ("holder", "age", "action"),
    [
        ("me", 99.0, LeaseAction.RENEW),
        ("other", 3.9, LeaseAction.WAIT),
        ("other", 4.0, LeaseAction.TAKE),
        ("", 0.0, LeaseAction.TAKE),
    ],
)
def test_a_lease_is_taken_when_free_or_unchanged_for_its_duration(holder: str, age: float, action: LeaseAction) -> None:
    assert next_action(ObservedLease(Lease(holder, "7", 4.0), since=10.0), "me", 10.0 + age) is action


def test_a_lease_that_is_not_there_is_made() -> None:
    assert next_action(ObservedLease(None, 0.0), "me", 0.0) is LeaseAction.CREATE


def test_only_a_change_starts_the_time_anew() -> None:
    first = updated(None, Lease("other", "7", 4.0), 1.0)
    assert updated(first, Lease("other", "7", 4.0), 3.0) == first
    assert updated(first, Lease("other", "8", 4.0), 3.0).since == 3.0


# A minute of such a world has no smaller one.
@settings(max_examples=examples(40), deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    rates=st.tuples(*[st.floats(0.9, 1.1)] * 3),
    zeros=st.tuples(*[st.floats(0, 1e6)] * 3),
    longest=st.sampled_from([1.4, 6.0]),
    seed=st.integers(0, 2**32),
)
def test_two_never_lead_at_once(rates: tuple[float, ...], zeros: tuple[float, ...], longest: float, seed: int) -> None:
    """Whatever the network and the clocks do, while leases become longer and shorter."""
    chance = random.Random(seed)

    cut_off_until = dict[str, float]()

    def way(replica: str) -> tuple[float, bool]:
        now = world.now()
        if chance.random() < 0.05:
            cut_off_until[replica] = now + chance.uniform(0, 8)
        slow = chance.random() < 0.1
        return chance.uniform(0, longest) if slow else 0.01, now >= cut_off_until.get(replica, 0)

    with World() as world:
        world.way = way
        for number, (rate, zero) in enumerate(zip(rates, zeros, strict=True)):
            world.join(f"r{number}", rate, zero)
        assert world.until(lambda: sum(election.leads for election in world.elections) > 1, 60) >= 60


def test_a_renewal_counts_from_when_it_was_asked_for_not_from_its_answer() -> None:
    with World() as world:
        leader = world.join("leader")
        world.until(lambda: leader.leads, 5)
        heir = world.join("heir")
        world.until(lambda: bool(heir.holder), 5)
        # The next renewal is written at once and answered late; of those that follow none is.
        ways = iter([(0.01, True), (1.2, True)])
        world.way = lambda replica: next(ways, (0.0, False)) if replica == "leader" else (0.01, True)
        assert world.until(lambda: leader.leads and heir.leads, 10) >= 10
        assert heir.leads


@given(phase=st.floats(0, 1))
@settings(max_examples=examples(20), deadline=None)
def test_who_dies_is_succeeded_after_the_lease_and_two_looks(phase: float) -> None:
    with World() as world:
        leader = world.join("leader")
        world.until(lambda: leader.leads, 5)
        heir = world.join("heir")
        world.until(lambda: False, 1 + phase)
        world.kill(leader)
        assert world.until(lambda: heir.leads, 10) <= TERMS.duration + 2 * TERMS.look_every + 2 * STEP
        assert not leader.leads


@pytest.mark.parametrize("seconds", [0.5, 1.0, 2.0, 4.0])
def test_on_a_slow_api_server_a_leader_goes_on_with_a_longer_lease(seconds: float) -> None:
    with World() as world:
        leader, standby = world.join("leader"), world.join("standby")
        world.until(lambda: leader.leads, 5)
        world.way = lambda replica: (seconds / 2, True)
        # The first renewals may be too late; then it has learnt.
        world.until(lambda: False, 60)
        leading = next(election for election in (leader, standby) if election.leads)
        assert world.until(lambda: not leading.leads, 120) >= 120
        assert world.lease["spec"]["leaseDurationSeconds"] >= 4 * seconds or seconds == 4.0
        world.way = lambda replica: (0.01, True)
        world.until(lambda: False, 400)
        assert world.lease["spec"]["leaseDurationSeconds"] == TERMS.duration
        assert leading.leads


def test_a_lease_that_becomes_shorter_is_short_for_its_holder_before_others_can_know_it() -> None:
    with World() as world:
        leader = world.join("leader")
        leader._slowest = 2.0
        long = leader.terms
        assert world.until(lambda: leader.leads, 5) < 5
        # It asks for a short lease, and gets no answer.
        leader._slowest = 0.0
        world.way = lambda replica: (0.01, False)
        assert world.until(lambda: not leader.leads, 60) < long.renew_every + TERMS.duration < long.renew_deadline


@contextmanager
def taking_part(*elections: Election) -> Iterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(election.run()) for election in elections]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def running(
    leadership: Leadership, begin: Callable[[], None] = lambda: None, end: Callable[[], None] = lambda: None
) -> Iterator[None]:
    task = asyncio.create_task(leadership.run([], begin, end))
    try:
        yield
    finally:
        task.cancel()


QUICK = Terms(duration=40, renew_deadline=30, renew_every=0.005, look_every=0.005)
"""For leases whose time is moved by `ticking`."""


def ticking(api: FakeApi) -> Callable[[], float]:
    """A clock that each request moves on: a lease lasts as long on a machine that has much else to do."""
    return lambda: float(len(api.requests))


def election(api: FakeApi, client: Client, me: str) -> Election:
    return Election(client, "system", "disttrain", me, QUICK, ticking(api))


async def test_one_leads_and_the_other_follows_when_it_lets_go(api: FakeApi, client: Client) -> None:
    first, second = election(api, client, "first"), election(api, client, "second")
    with taking_part(first, second) as tasks:
        await eventually(lambda: first.leads or second.leads)
        assert not (first.leads and second.leads)
        leader, standby = (first, second) if first.leads else (second, first)
        await eventually(lambda: standby.holder == leader.me)
        tasks[0 if leader is first else 1].cancel()
        await leader.release()
        assert not leader.leads
        await eventually(lambda: standby.leads)


async def test_a_lease_is_given_back_although_a_renewal_was_cut_off(api: FakeApi, client: Client) -> None:
    leader = election(api, client, "leader")
    with taking_part(leader) as tasks:
        await eventually(lambda: leader.leads)
        tasks[0].cancel()
        path = "/apis/coordination.k8s.io/v1/namespaces/system/leases/disttrain"
        # Written, but its answer never came: the leader knows an older version.
        await client.replace(path, await client.get(path))
        await leader.release()
        assert (await client.get(path))["spec"]["holderIdentity"] == ""


async def test_a_leader_without_an_api_server_ceases_to_act_and_comes_back(api: FakeApi, client: Client) -> None:
    only = election(api, client, "only")
    with taking_part(only):
        await eventually(lambda: only.leads)
        api.refusals.append(lambda method, path, body: refusal(503, "ServiceUnavailable"))
        await eventually(lambda: not only.leads)
        api.refusals.clear()
        await eventually(lambda: only.leads)


async def test_a_leader_that_stood_still_begins_anew_although_nobody_took_its_lease(client: Client) -> None:
    now, begun, ended = [0.0], list[float](), list[float]()
    only = Election(client, "system", "disttrain", "only", QUICK, clock=lambda: now[0])
    leadership = Leadership(only)
    with taking_part(only), running(leadership, lambda: begun.append(now[0]), lambda: ended.append(now[0])):
        await eventually(lambda: begun == [0.0])
        # As if the process had been stopped: work that it was about to do is refused from here on.
        now[0] = QUICK.renew_deadline
        assert not leadership.acts()
        await eventually(lambda: begun == [0.0, QUICK.renew_deadline])
        assert leadership.acts()
        assert ended[-1] == QUICK.renew_deadline


async def test_the_lease_of_a_dead_leader_is_taken(api: FakeApi, client: Client) -> None:
    dead, heir = election(api, client, "dead"), election(api, client, "heir")
    with taking_part(dead):
        await eventually(lambda: dead.leads)
    with taking_part(heir):
        await eventually(lambda: heir.leads)
    assert not dead.leads
    spec = api.objects["/apis/coordination.k8s.io/v1/namespaces/system/leases/disttrain"]["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("heir", 1)


async def test_what_is_not_allowed_to_write_reads_on(client: Client, api: FakeApi) -> None:
    client.may_write = lambda: False
    with pytest.raises(StandingBy, match="was not sent: another replica acts"):
        await client.create("/api/v1/namespaces/a/pods", {"metadata": {"name": "x"}})
    assert (await client.get("/api/v1/namespaces/a/pods"))["items"] == []
    assert api.asked("POST") == []


async def test_every_answer_is_counted(client: Client, api: FakeApi) -> None:
    answers: list[tuple[str, int]] = []
    client.on_answer = lambda method, code, seconds: answers.append((method, code))
    await client.get("/api/v1/namespaces/a/pods")
    api.refusals.append(lambda method, path, body: refusal(500, "InternalError"))
    with pytest.raises(Unavailable, match=r"^500: "):
        await client.get("/api/v1/namespaces/a/pods")
    assert answers[0] == ("GET", 200)
    assert set(answers[1:]) == {("GET", 500)}


def test_so_many_leases_are_not_renewed_more_often_than_twenty_times_a_second_together() -> None:
    assert terms_of(2, 1) == terms_of(2, 10) == Terms()
    assert 50 / terms_of(2, 50).renew_every == 20
    assert terms_of(15, 50).duration == 15
