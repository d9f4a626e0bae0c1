"""One of several replicas acts, whatever the network and the clocks do; and the next one takes over."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import StandingBy, Unavailable
from disttrain_operator.kube.lease import Election, Lease, Sight, Terms, Turn, next_turn, updated
from disttrain_operator.leadership import Leadership
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal

TERMS = Terms()


@pytest.mark.parametrize(
    ("holder", "age", "turn"),
    [
        ("me", 99.0, Turn.RENEW),
        ("other", 3.9, Turn.WAIT),
        ("other", 4.0, Turn.TAKE),
        ("", 0.0, Turn.TAKE),
    ],
)
def test_a_lease_is_taken_when_it_is_free_or_has_not_changed_for_its_duration(
    holder: str, age: float, turn: Turn
) -> None:
    assert next_turn(Sight(Lease(holder, "7", 4.0), since=10.0), "me", 10.0 + age) is turn


def test_a_lease_that_is_not_there_is_made() -> None:
    assert next_turn(Sight(None, 0.0), "me", 0.0) is Turn.CREATE


def test_only_a_change_starts_the_time_anew() -> None:
    first = updated(None, Lease("other", "7", 4.0), 1.0)
    assert updated(first, Lease("other", "7", 4.0), 3.0) == first
    assert updated(first, Lease("other", "8", 4.0), 3.0).since == 3.0


class Replica:
    """A replica in a world of steps: its clock runs at its own rate from its own zero."""

    def __init__(self, name: str, rate: float, zero: float) -> None:
        self.name, self.rate, self.zero = name, rate, zero
        self.sight: Sight | None = None
        self.acts_until = float("-inf")

    def clock(self, time: float) -> float:
        return self.zero + time * self.rate

    def acts(self, time: float) -> bool:
        return self.clock(time) < self.acts_until


STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),  # whose turn
        st.floats(0.05, 2.5),  # time that passes before
        st.sampled_from(["reaches", "unanswered", "lost"]),  # what becomes of the write
        st.floats(0.0, 2.0),  # time between reading the clock and the write's arrival
    ),
    max_size=60,
)


@settings(max_examples=400)
@given(rates=st.tuples(*[st.floats(0.9, 1.1)] * 3), zeros=st.tuples(*[st.floats(0, 1e6)] * 3), steps=STEPS)
def test_two_never_act_at_once(
    rates: tuple[float, ...], zeros: tuple[float, ...], steps: list[tuple[int, float, str, float]]
) -> None:
    replicas = [Replica(f"r{number}", *pair) for number, pair in enumerate(zip(rates, zeros, strict=True))]
    stored: Lease | None = None
    version, time = 0, 0.0
    for who, pause, fate, delay in steps:
        time += pause
        replica = replicas[who]
        assert sum(other.acts(time) for other in replicas) <= 1
        if not replica.acts(time):
            replica.sight = updated(replica.sight, stored, replica.clock(time))
        assert replica.sight is not None
        asked = replica.clock(time)
        turn, known = next_turn(replica.sight, replica.name, asked), replica.sight.lease
        if turn is Turn.WAIT:
            continue
        time += delay
        if fate == "lost" or stored != known:
            continue
        version += 1
        stored = Lease(replica.name, str(version), TERMS.duration)
        if fate == "reaches":
            replica.sight = Sight(stored, asked)
            replica.acts_until = asked + TERMS.renew_deadline
        assert sum(other.acts(time) for other in replicas) <= 1


@contextmanager
def taking_part(*elections: Election) -> Iterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(election.run()) for election in elections]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def running(leadership: Leadership) -> Iterator[None]:
    task = asyncio.create_task(leadership.run())
    try:
        yield
    finally:
        task.cancel()


QUICK = Terms(duration=40, renew_deadline=30, renew_every=0.005, look_every=0.005)
"""Of leases whose time is told by `ticking`."""


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
    now, begun = [0.0], list[float]()
    only = Election(client, "system", "disttrain", "only", QUICK, clock=lambda: now[0])
    leadership = Leadership(only, [], lambda: begun.append(now[0]))
    with taking_part(only), running(leadership):
        await eventually(lambda: begun == [0.0])
        # As if the process had been stopped: work that it was about to do is refused from here on.
        now[0] = QUICK.renew_deadline
        assert not leadership.acts
        await eventually(lambda: begun == [0.0, QUICK.renew_deadline])
        assert leadership.acts


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
    with pytest.raises(StandingBy):
        await client.create("/api/v1/namespaces/a/pods", {"metadata": {"name": "x"}})
    assert (await client.get("/api/v1/namespaces/a/pods"))["items"] == []
    assert api.asked("POST") == []


async def test_every_answer_is_counted(client: Client, api: FakeApi) -> None:
    told: list[tuple[str, int]] = []
    client.on_answer = lambda method, code, seconds: told.append((method, code))
    await client.get("/api/v1/namespaces/a/pods")
    api.refusals.append(lambda method, path, body: refusal(500, "InternalError"))
    with pytest.raises(Unavailable):
        await client.get("/api/v1/namespaces/a/pods")
    assert told[0] == ("GET", 200)
    assert set(told[1:]) == {("GET", 500)}
