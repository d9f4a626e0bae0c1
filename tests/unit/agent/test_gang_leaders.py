"""Worker 0's pod is lost, and another one leads in its place: what the others tell it, and what they do until then."""

from collections.abc import Sequence
from typing import Any

import pytest

from disttrain_agent.gang.follow import FollowingAgent
from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import History, Kind, Message, PodFailure
from disttrain_agent.restart import Limits
from disttrain_api.names import ExitCode, Reason

from .test_gang_decisions import (
    LONGEST,
    PATIENCE,
    TYPO,
    WINDOW,
    a_leader,
    all_end,
    exited,
    killed,
    orders,
    out_of_memory,
    raised,
)
from .test_gang_strangers import KEY, WORKERS, Port, until


def another(workers: int = 3, restarts: int = 3, replacement: int = 1, now: float = 100.0, **facts: Any) -> Leader:
    """The leader of a pod that the operator has made in place of worker 0's."""
    return Leader(workers, Limits(restarts, 0), WINDOW, PATIENCE, LONGEST, replacement=replacement, now=now, **facts)


def joined(leader: Leader, worker: int, member: Member, now: float = 100.0) -> list[Message]:
    """Connect a member, have the leader hear what it says, and return what that orders it."""
    member.connected()
    said, member.orders = member.orders, []
    for message in said:
        if message.kind is Kind.JOINS:
            assert leader.joins(worker, message.generation, now, message.replacement, message.history)
        elif message.failure is not None:
            leader.ended(worker, message.generation, message.failure, now)
        else:
            leader.failed(worker, message.generation, now)
    return [] if leader.standing is None else [leader.standing]


def started(leader: Leader, *members: Member, now: float = 1000.0) -> Message:
    """Have the leader start the next generation, and the members hear of it."""
    leader.tick(now)
    start = leader.orders.pop()
    assert start.kind is Kind.START
    leader.orders.clear()
    for member in members:
        member.receive(start)
        assert member.generation == start.generation
    return start


def trained(restarts: int = 3, *ends: PodFailure) -> tuple[Leader, list[Member]]:
    """Two members and their leader, after these failures of worker 1, each with a restart."""
    leader, members = a_leader(restarts=restarts, backoff=0), [Member(longest=LONGEST), Member(longest=LONGEST)]
    for member in members:
        member.connected()
    for end in ends:
        all_end(leader, exited(ExitCode.PEER_LOST, 0), end, exited(ExitCode.PEER_LOST, 2))
        for member in members:
            member.ended(end)
        started(leader, *members)
    for member in members:
        member.lost(100.0)
        member.orders.clear()
    return leader, members


def taken_over(members: Sequence[Member], restarts: int = 3) -> Leader:
    """Another leader, with which the members have started once their ranks had lost their peer."""
    leader = another(restarts=restarts)
    for worker, member in enumerate(members, start=1):
        member.ended(exited(ExitCode.PEER_LOST, worker))
        joined(leader, worker, member)
    started(leader, *members)
    return leader


def test_another_leader_stops_all_who_join_and_starts_the_generation_after_theirs() -> None:
    _, members = trained(3, killed())
    leader = another(ranks_per_pod=4)
    assert joined(leader, 1, members[0]) == []
    leader.tick(100.0 + WINDOW)
    assert orders(leader) == [(Kind.STOP, 1)]
    for stop in joined(leader, 2, members[1], now=150.0):
        members[1].receive(stop)
    assert members[1].must_stop, "it joined after the order to the others"
    leader.tick(150.0 + PATIENCE - 0.1)
    assert (leader.left, leader.generation, leader.due) == (None, 0, 150.0 + PATIENCE)
    for worker, member in enumerate(members, start=1):
        member.ended(exited(ExitCode.PEER_LOST, worker))
        leader.ended(worker, 1, exited(ExitCode.PEER_LOST, worker), 155.0)
    assert started(leader, *members, now=155.0).generation == 2
    assert leader.restart is not None
    assert (leader.restart.count, leader.restart.cause.rank, leader.restart.cause.reason) == (2, 0, Reason.POD_LOST)
    assert leader.restart.pause_seconds == 0


def test_it_starts_nothing_before_all_have_said_that_nothing_of_their_ranks_is_left() -> None:
    """Not even where a pod is a replacement itself, whose ranks run."""
    leader = another(replacement=7)
    assert leader.joins(1, 3, 100.0, replacement=2)
    assert leader.joins(2, 3, 100.0)
    leader.ended(2, 3, killed(2), 101.0)
    leader.tick(110.0)
    assert leader.generation == 0
    leader.ended(1, 2, killed(1), 111.0)
    leader.tick(112.0)
    assert leader.generation == 0, "it is of a former generation"
    leader.ended(1, 3, killed(1), 113.0)
    leader.tick(113.0)
    assert leader.generation == 4


def test_who_did_not_hear_of_the_last_start_goes_on_with_the_others_behind_it() -> None:
    leader, (heard, missed) = trained(3, killed())
    for member in (heard, missed):
        member.connected()
    all_end(leader, *map(killed, range(3)))
    for member in (heard, missed):
        member.ended(killed())
    started(leader, heard)
    for member in (heard, missed):
        member.lost(100.0)
        member.orders.clear()
    heard.ended(exited(ExitCode.PEER_LOST))
    new = another()
    joined(new, 2, missed)
    joined(new, 1, heard)
    assert started(new, heard, missed).generation == 3


def test_a_pod_that_has_heard_a_former_leaders_last_order_in_the_meantime_has_to_end_its_ranks_again() -> None:
    leader = another()
    for worker in (1, 2):
        assert leader.joins(worker, 1, 100.0)
    leader.ended(1, 1, killed(1), 101.0)
    assert leader.joins(1, 2, 102.0)
    leader.ended(2, 1, killed(2), 103.0)
    leader.tick(110.0)
    assert leader.generation == 0
    leader.ended(1, 2, killed(1), 111.0)
    leader.tick(111.0)
    assert leader.generation == 3


def test_a_former_leaders_order_to_jump_is_none() -> None:
    member = Member(longest=LONGEST)
    member.connected()
    member.ended(killed())
    member.receive(Message(kind=Kind.START, generation=3, replacement=2))
    assert (member.generation, member.leader) == (3, 2)
    member.ended(killed())
    for late in (1, 2):
        member.receive(Message(kind=Kind.START, generation=6, replacement=late))
    assert member.generation == 3


def test_a_former_leader_that_lives_leads_nobody_who_has_started_with_another_one() -> None:
    """Both have begun the generation of one number: the former one alone, as nobody could reach its pod any more."""
    former, members = trained(3)
    all_end(former, *[killed()] * 3, now=100.0)
    for worker, member in enumerate(members, 1):
        member.ended(killed(worker))
    former.tick(100.0)
    leader = another()
    for worker, member in enumerate(members, 1):
        joined(leader, worker, member)
    started(leader, *members)
    assert former.generation == leader.generation == 1
    member = members[0]
    member.lost(1100.0)
    member.connected()
    taken, answer = former.admit(1, member.orders.pop(), 1100.0)
    assert (taken, answer) == (False, None), "the member looks for another one"
    assert former.left is not None
    assert former.left.why == "another pod of worker 0 has taken its place"
    assert orders(former) == [(Kind.START, 1)], "and hears nothing more"


def test_restarts_that_are_used_up_stay_used_up_when_another_pod_leads() -> None:
    _, members = trained(2, killed(), killed())
    leader = taken_over(members, restarts=2)
    all_end(leader, *map(killed, range(3)))
    assert leader.left is not None
    assert "2 restarts in place without a new checkpoint are used up" in leader.left.why


def test_a_failure_that_comes_again_under_another_leader_is_known() -> None:
    _, members = trained(3, raised())
    leader = taken_over(members)
    all_end(leader, exited(ExitCode.PEER_LOST, 0), raised(), exited(ExitCode.PEER_LOST, 2))
    assert leader.left is not None
    assert leader.left.repeated == TYPO


def test_a_rank_that_runs_out_of_memory_again_under_another_leader_ends_all_pods() -> None:
    _, members = trained(9, killed(), out_of_memory())
    leader = another(restarts=9)
    for worker, member in enumerate(members, start=1):
        member.ended(exited(ExitCode.PEER_LOST, worker))
        joined(leader, worker, member)
    started(leader, *members)
    all_end(leader, exited(ExitCode.PEER_LOST, 0), out_of_memory(), exited(ExitCode.PEER_LOST, 2))
    assert leader.left is not None
    assert leader.left.why == "a rank has run out of memory again, without a new checkpoint in between"


def test_the_newest_checkpoint_that_was_known_renews_no_restart_again() -> None:
    _, members = trained(1, killed(checkpoint=20))
    leader = another(restarts=1)
    for worker, member in enumerate(members, start=1):
        member.ended(exited(ExitCode.PEER_LOST, worker, checkpoint=20))
        joined(leader, worker, member)
    started(leader, *members)
    all_end(leader, *(killed(checkpoint=20) for _ in range(3)))
    assert leader.left is not None


def test_where_none_is_left_that_has_trained_nobody_knows_the_generation() -> None:
    leader = another(workers=2)
    assert leader.joins(1, 0, 100.0, replacement=2)
    assert leader.left is not None
    assert leader.left.why == "all pods are replacements: none knows the generation of the former ones"


def test_a_lost_pod_beside_worker_0s_is_awaited_by_the_new_leader() -> None:
    _, (left, _) = trained(3, killed())
    leader = another()
    left.ended(exited(ExitCode.PEER_LOST))
    joined(leader, 1, left)
    leader.tick(300.0)
    assert (leader.awaited, leader.due) == ({2}, 100.0 + LONGEST)
    assert leader.joins(2, 0, 400.0, replacement=2)
    assert started(leader, left, now=400.0).generation == 2


def test_what_no_replacement_repairs_ends_all_pods_under_another_leader_too() -> None:
    leader = another()
    for worker in (1, 2):
        assert leader.joins(worker, 0, 100.0)
        leader.ended(worker, 0, exited(ExitCode.DISK_FULL, worker), 100.0)
    assert leader.left is not None


def test_a_leader_that_is_asked_to_end_orders_nothing_and_starts_nothing() -> None:
    leader = a_leader()
    leader.depart("SIGTERM to the pod")
    all_end(leader, killed(), killed(), killed())
    leader.tick(1000.0)
    assert (leader.orders, leader.generation, leader.departed) == ([], 0, True)
    assert not leader.joins(1, 0, 1000.0)


async def test_the_ranks_meet_at_the_address_where_the_new_leader_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name may still lead to the former pod."""

    async def both(host: str, number: int) -> list[str]:
        return ["127.0.0.2", "127.0.0.1"]

    monkeypatch.setattr("disttrain_agent.gang.follow.addresses", both)
    port = Port(Leader(WORKERS, Limits(3, 0), 1.0, 60.0, 900.0, replacement=2))
    followers = [
        FollowingAgent(lambda: None, port.log.append, KEY, worker, WORKERS, "worker-0", port.address[1], longest=60.0)
        for worker in (1, 2)
    ]
    await until(lambda: port.leader._present == {0, 1, 2})
    assert not any("is lost" in line for line in port.log), "all others are to come, and none is lost"
    for follower in followers:
        assert follower.master_address is None
        follower.ended(killed(), 0.0)
    await until(lambda: len(port.leader._ended) == WORKERS)
    port.agent.tick()
    await until(lambda: [follower.generation for follower in followers] == [1, 1])
    assert [follower.master_address for follower in followers] == ["127.0.0.1", "127.0.0.1"]
    assert port.agent.master_address == "127.0.0.1", "ranks of its own pod meet there, too"
    for follower in followers:
        follower.close()
    port.close()


async def test_a_follower_waits_for_another_leader_and_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    port = Port()
    follower = FollowingAgent(
        lambda: None, port.log.append, KEY, 1, WORKERS, *port.address, longest=6000.0, unmoved=60.0
    )
    await until(lambda: 1 in port.leader._present)
    port.agent.depart("SIGTERM to the pod")
    await until(lambda: follower._channel is None)
    assert follower.awaited == frozenset()
    follower.ended(killed(), 0.0)
    assert (follower.left, follower.awaited) == (None, {0})
    begun = follower._member._alone_since or 0.0
    await until(lambda: follower.due == begun + 60.0)

    async def nobody(host: str, number: int) -> list[str]:
        raise OSError(f"{host} has no address")

    monkeypatch.setattr("disttrain_agent.gang.follow.addresses", nobody)
    await until(lambda: follower.due == begun + 6000.0)
    follower.close()
    port.close()


def test_a_member_passes_on_the_former_restarts_that_its_leader_has_sent() -> None:
    history = History(since_checkpoint=2, checkpoint=40, signature=TYPO, out_of_memory=True)
    member = Member(longest=LONGEST)
    member.connected()
    member.ended(killed())
    member.receive(Message(kind=Kind.START, generation=1, history=history))
    member.orders.clear()
    member.connected()
    assert [(order.kind, order.generation, order.history) for order in member.orders] == [(Kind.JOINS, 1, history)]


def test_another_leader_that_hears_of_an_older_generation_later_starts_the_one_after_the_newest() -> None:
    leader = another()
    assert leader.joins(1, 2, 100.0, history=History(since_checkpoint=2))
    assert leader.joins(2, 1, 100.0, history=History(since_checkpoint=1))
    leader.ended(1, 2, killed(), 101.0)
    leader.ended(2, 1, killed(2), 101.0)
    leader.tick(101.0)
    assert orders(leader) == [(Kind.START, 3)]
    assert leader.restart is not None
    assert leader.restart.count == 3
