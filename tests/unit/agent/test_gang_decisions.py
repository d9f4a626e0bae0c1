"""When all pods of a gang start their ranks again, and when none does: by failures, times and connections."""

from typing import Any

import pytest

from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import MAX_BODY_BYTES, Kind, Message, PodFailure, decode, encode, leaves
from disttrain_agent.restart import Limits
from disttrain_api.names import ExitCode, Reason
from disttrain_api.report import MAX_ERROR_NAME, MAX_PLACE, FailureSignature, RankFailure

WINDOW, PATIENCE, LONGEST = 1.0, 60.0, 900.0
TYPO = FailureSignature(error="NameError", place="/app/model.py:12", step=4, steps_done=4)


def a_leader(workers: int = 3, restarts: int = 3, backoff: int = 10) -> Leader:
    """A leader whose members have all joined."""
    leader = Leader(workers, Limits(restarts, backoff), WINDOW, PATIENCE, LONGEST)
    assert all(leader.joins(worker, 0, 0.0) for worker in range(1, workers))
    return leader


def killed(rank: int = 1, **facts: Any) -> PodFailure:
    return PodFailure(cause=RankFailure(rank=rank, exit_code=137, signal=9), **facts)


def out_of_memory(rank: int = 1) -> PodFailure:
    return PodFailure(cause=RankFailure(rank=rank, exit_code=137, signal=9, reason=Reason.OOM_KILLED))


def exited(code: int, rank: int = 1, **facts: Any) -> PodFailure:
    return PodFailure(cause=RankFailure(rank=rank, exit_code=code), **facts)


def raised(rank: int = 1) -> PodFailure:
    return PodFailure(cause=RankFailure(rank=rank, exit_code=1, signature=TYPO))


def all_end(leader: Leader, *ends: PodFailure, now: float = 0.0) -> None:
    """Every pod ends, in this order of workers."""
    for worker, end in enumerate(ends):
        leader.ended(worker, leader.generation, end, now)


def orders(leader: Leader) -> list[tuple[Kind, int]]:
    found = [(order.kind, order.generation) for order in leader.orders]
    leader.orders.clear()
    return found


def test_all_stop_after_a_while_and_start_when_all_have_ended_and_the_pause_is_over() -> None:
    leader = a_leader()
    leader.failed(1, 0, 100.0)
    leader.tick(100.9)
    assert (orders(leader), leader.due) == ([], 101.0)
    leader.tick(101.0)
    leader.tick(101.1)
    assert (orders(leader), leader.must_stop, leader.due) == ([(Kind.STOP, 0)], True, 160.0)
    for worker in (1, 2):
        leader.ended(worker, 0, killed(), 103.0)
    leader.tick(103.0)
    assert orders(leader) == []
    leader.ended(0, 0, killed(), 104.0)
    leader.tick(104.0)
    assert (orders(leader), leader.generation, leader.must_stop, leader.due) == ([(Kind.START, 1)], 1, False, None)
    all_end(leader, killed(), killed(), killed(), now=200.0)
    leader.tick(209.9)
    assert (orders(leader), leader.due) == ([], 210.0), "the second restart waits"
    leader.tick(210.0)
    assert orders(leader) == [(Kind.START, 2)]


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        ((exited(ExitCode.PEER_LOST, 0), killed(1), exited(ExitCode.PEER_LOST, 2)), 1),
        ((exited(ExitCode.PEER_LOST, 0), exited(1, 1), exited(ExitCode.PEER_LOST, 2)), 1),
        ((killed(0, signaled=True), exited(ExitCode.PEER_LOST, 1), killed(2, signaled=True)), 1),
        ((exited(ExitCode.STOPPED, 0, signaled=True), exited(ExitCode.PEER_LOST, 1), killed(2, signaled=True)), 1),
        ((exited(3, 0), killed(1), killed(2)), 1),
    ],
    ids=["a kill", "an exit", "the others were killed for it", "one obeyed", "the nearest of several"],
)
def test_the_first_cause_counts_and_not_what_followed_from_it(ends: tuple[PodFailure, ...], rank: int) -> None:
    leader = a_leader()
    all_end(leader, *ends)
    assert leader.restart is not None
    assert leader.restart.cause.rank == rank


def test_what_no_restart_here_can_repair_ends_all_pods() -> None:
    for end in (exited(ExitCode.INVALID_CONFIGURATION), exited(ExitCode.DISK_FULL)):
        leader = a_leader()
        all_end(leader, exited(ExitCode.PEER_LOST, 0), end, exited(ExitCode.PEER_LOST, 2))
        assert leader.left is not None
        assert orders(leader) == [(Kind.LEAVES, 0)]
        leader.tick(1000.0)
        assert (orders(leader), leader.due, leader.generation) == ([], None, 0)


def test_the_budget_is_the_jobs_and_its_newest_checkpoint_renews_it() -> None:
    leader = a_leader(workers=2, restarts=1, backoff=0)
    for checkpoint in (None, 10, 20):
        all_end(leader, killed(checkpoint=checkpoint), killed(checkpoint=5))
        assert leader.left is None
        leader.tick(0.0)
    all_end(leader, killed(checkpoint=20), killed())
    assert leader.left is not None
    assert "used up" in leader.left.why


def test_a_failure_that_comes_again_is_named_to_all() -> None:
    leader = a_leader(workers=2, backoff=0)
    all_end(leader, exited(ExitCode.PEER_LOST), raised())
    leader.tick(0.0)
    all_end(leader, exited(ExitCode.PEER_LOST), raised())
    assert leader.left is not None
    assert leader.left.repeated == TYPO
    assert leader.orders[-1].repeated == TYPO


def test_a_pod_that_does_not_end_its_ranks_in_time_ends_the_wait_of_all() -> None:
    leader = a_leader()
    leader.ended(1, 0, killed(), 0.0)
    leader.ended(0, 0, killed(), 5.0)
    leader.tick(PATIENCE - 0.1)
    assert leader.left is None
    leader.tick(PATIENCE)
    assert leader.left is not None
    assert leader.left.why == "the ranks of worker 2 have not ended in time"


def test_an_agent_that_is_lost_may_come_back_amid_a_restart_too_and_says_again_how_its_ranks_have_ended() -> None:
    leader = a_leader()
    leader.lost(2)
    assert leader.left is None
    assert leader.joins(2, 0, 0.0)
    for worker in (1, 2, 0):
        leader.ended(worker, 0, killed(worker), 0.0)
        leader.lost(2)
    assert leader.awaited == {2}
    assert leader.joins(2, 0, 50.0)
    leader.tick(50.0)
    assert (leader.generation, leader.due) == (0, 50.0 + PATIENCE)
    leader.ended(2, 0, killed(2), 51.0)
    leader.tick(51.0)
    assert leader.generation == 1
    leader.leave("for a reason")
    assert not leader.joins(2, 0, 0.0, replacement=1)


def test_a_failure_before_all_agents_have_ever_joined_restarts_nothing() -> None:
    leader = Leader(3, Limits(3, 0), WINDOW, PATIENCE, LONGEST)
    assert leader.joins(1, 0, 0.0)
    leader.failed(1, 0, 0.0)
    assert leader.left is not None
    assert leader.left.why == "the agent of worker 2 is not connected"


def test_what_comes_twice_counts_once() -> None:
    leader = a_leader()
    all_end(leader, exited(3), killed(), killed())
    leader.ended(0, 0, killed(0), 5.0)
    assert leader.restart is not None
    assert (leader.restart.count, leader.restart.cause.rank, leader.due) == (1, 1, 0.0)


def test_what_comes_late_of_a_former_generation_counts_for_none() -> None:
    leader = a_leader(backoff=0)
    all_end(leader, killed(), killed(), killed())
    leader.tick(0.0)
    for worker in range(3):
        leader.failed(worker, 0, 1.0)
        leader.ended(worker, 0, killed(), 1.0)
        leader.ended(worker, 2, killed(), 1.0)
    leader.tick(100.0)
    assert (leader.generation, leader.must_stop, leader.left) == (1, False, None)


def test_an_agent_of_another_life_takes_no_part() -> None:
    leader = a_leader(backoff=0)
    all_end(leader, killed(), killed(), killed())
    leader.tick(0.0)
    assert not leader.joins(1, 0, 1.0)
    assert not leader.joins(1, 2, 1.0)
    assert leader.joins(1, 1, 1.0)


def test_a_member_that_was_never_connected_ends_as_without_the_setting() -> None:
    member = Member(longest=LONGEST)
    member.failed()
    assert member.left is not None


def test_a_member_waits_less_long_where_worker_0s_pod_is_where_it_was() -> None:
    member = Member(longest=LONGEST, unmoved=240.0)
    member.connected()
    member.ended(killed())
    member.lost(100.0)
    assert member.due == 100.0 + LONGEST
    member.leader_moved = False
    assert member.due == 340.0
    member.tick(340.0)
    assert member.left is not None


@pytest.mark.parametrize("first", ["ended", "lost"])
def test_a_member_whose_connection_is_lost_waits_for_another_one_but_not_for_ever(first: str) -> None:
    member = Member(longest=LONGEST)
    member.connected()
    if first == "ended":
        member.ended(killed(), now=100.0)
    assert (member.due, member.is_alone) == (None, False)
    member.lost(100.0)
    if first == "lost":
        assert member.due is None, "its ranks train"
        member.ended(killed(), now=100.0)
    assert (member.due, member.is_alone) == (100.0 + LONGEST, True)
    member.tick(100.0 + LONGEST - 0.1)
    assert member.left is None
    member.connected()
    assert (member.due, member.is_alone) == (None, False)
    member.lost(200.0)
    member.tick(200.0 + LONGEST)
    assert member.left is not None
    assert member.left.why == "worker 0's agent is not connected, and no other one in its place"


def test_a_member_starts_its_ranks_only_when_it_is_ordered_to_after_they_have_ended() -> None:
    member, start = Member(), Message(kind=Kind.START, generation=1)
    member.connected()
    member.receive(start)
    member.failed()
    member.receive(start)
    assert member.generation == 0
    member.ended(killed())
    member.receive(Message(kind=Kind.START, generation=2))
    assert member.generation == 0
    member.receive(start)
    assert (member.generation, member.must_stop) == (1, False)
    for late in (Message(kind=Kind.STOP, generation=0), leaves(0, "late"), start):
        member.receive(late)
    assert (member.generation, member.must_stop, member.left) == (1, False, None)


@pytest.mark.parametrize("character", ["x", "\x01", "\U0001f600", '"'])
def test_a_failure_with_the_longest_texts_is_one_line_that_is_heard(character: str) -> None:
    text = character * 10_000
    signature = FailureSignature(error=character * MAX_ERROR_NAME, place=character * MAX_PLACE, step=1)
    cause = RankFailure(rank=1, exit_code=1, reason=text, message=text, unquoted=text, signature=signature)
    message = Message(kind=Kind.ENDED, generation=0, failure=PodFailure(cause=cause))
    assert len(encode(message)) <= MAX_BODY_BYTES
    assert b"\n" not in encode(message)
    assert decode(encode(message)) == message


def test_what_is_no_message_is_none() -> None:
    for body in (b"", b"{}", b"[]", b"\xff", b'{"kind":"dance","generation":0}', b'{"kind":"stop","generation":-1}'):
        assert decode(body) is None
    assert decode(b'{"kind":"stop","generation":1,"more":2}') == Message(kind=Kind.STOP, generation=1)
