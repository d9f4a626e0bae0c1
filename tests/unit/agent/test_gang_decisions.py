"""When all pods of a gang start their ranks again, and when none does: by failures, times and connections."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import MAX_BODY_BYTES, Kind, Message, PodFailure, decode, encode, leaves
from disttrain_agent.restart import Limits
from disttrain_api.names import ExitCode
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
    for end in (exited(ExitCode.INVALID_CONFIGURATION), exited(ExitCode.DISK_FULL), killed(out_of_memory=True)):
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


def test_an_agent_that_is_lost_may_come_back_while_all_train_and_not_amid_a_restart() -> None:
    leader = a_leader()
    leader.lost(2)
    assert leader.left is None
    assert leader.joins(2, 0, 0.0)
    leader.failed(1, 0, 0.0)
    assert not leader.joins(2, 0, 0.0)
    leader.lost(2)
    assert leader.awaited == {2}
    assert not leader.joins(2, 0, 0.0)
    leader.leave("for a reason")
    assert not leader.joins(2, 0, 0.0, replacement=1)


def lost_pod(leader: Leader, worker: int = 2, now: float = 0.0) -> None:
    """A pod is lost, and the others have noticed and ended their ranks."""
    leader.lost(worker)
    for other in {0, 1, 2} - {worker}:
        leader.ended(other, leader.generation, exited(ExitCode.PEER_LOST, other), now)


def test_the_next_generation_waits_for_another_pod_in_place_of_a_lost_one_and_starts_with_it() -> None:
    leader = Leader(3, Limits(0, 10), WINDOW, PATIENCE, LONGEST, ranks_per_pod=4)
    assert all(leader.joins(worker, 0, 0.0) for worker in (1, 2))
    lost_pod(leader)
    leader.tick(PATIENCE + 1)
    assert (leader.left, leader.awaited, leader.due) == (None, {2}, LONGEST)
    assert orders(leader) == [(Kind.STOP, 0)]
    assert leader.joins(2, 0, 300.0, replacement=1)
    leader.tick(300.0)
    assert (orders(leader), leader.generation, leader.awaited) == ([(Kind.START, 1)], 1, frozenset())
    assert leader.restart is not None, "although no restart of ranks is left: the operator counts this one"
    assert (leader.restart.count, leader.restart.pause_seconds) == (1, 0)
    assert (leader.restart.cause.rank, leader.restart.cause.reason) == (8, "PodLost")


def test_a_lost_pod_that_has_no_replacement_in_time_ends_the_wait_of_all() -> None:
    leader = a_leader()
    lost_pod(leader, now=5.0)
    leader.tick(5.0 + LONGEST - 0.1)
    assert leader.left is None
    leader.tick(5.0 + LONGEST)
    assert leader.left is not None
    assert leader.left.why == "no other pod of worker 2 has joined in time"


def test_a_replacement_is_the_first_sign_of_a_loss_that_no_rank_has_noticed() -> None:
    leader = a_leader()
    assert leader.joins(2, 0, 100.0, replacement=3)
    leader.tick(100.0 + WINDOW)
    assert (orders(leader), leader.must_stop) == ([(Kind.STOP, 0)], True)
    for worker in (0, 1):
        leader.ended(worker, 0, killed(worker, signaled=True), 103.0)
    leader.tick(103.0)
    assert orders(leader) == [(Kind.START, 1)]


def test_a_pod_that_another_one_has_replaced_takes_no_part_whenever_it_comes() -> None:
    leader = a_leader()
    lost_pod(leader)
    assert leader.joins(2, 0, 1.0, replacement=2)
    for former in (0, 1):
        assert not leader.joins(2, 0, 2.0, replacement=former)
        assert leader.is_former(2, former)
    leader.lost(2)
    assert not leader.joins(2, 0, 3.0, replacement=1), "nor while another one is awaited"
    assert not leader.joins(2, 0, 3.0, replacement=2), "one that was ordered nothing does not come again"
    assert leader.joins(2, 0, 4.0, replacement=5)
    leader.tick(4.0)
    assert leader.generation == 1
    for former in (0, 1, 2):
        assert not leader.joins(2, former, 5.0, replacement=former)
    assert leader.joins(2, 1, 5.0, replacement=5), "after a short loss of its connection"
    assert not leader.is_former(2, 5)
    leader.tick(1000.0)
    assert (leader.generation, leader.due, leader.left) == (1, None, None)


def test_a_replacement_that_is_lost_before_all_start_is_awaited_again() -> None:
    leader = a_leader()
    lost_pod(leader)
    assert leader.joins(2, 0, 1.0, replacement=1)
    leader.lost(2)
    leader.tick(2.0)
    assert (leader.generation, leader.awaited, leader.due) == (0, {2}, LONGEST)


@pytest.mark.parametrize("end", [exited(ExitCode.STOPPED, 1), killed(1, signaled=True), exited(ExitCode.PEER_LOST)])
def test_a_pod_that_departs_may_have_all_save_a_checkpoint_and_is_replaced(end: PodFailure) -> None:
    leader = a_leader()
    leader.departs(2)
    leader.tick(500.0)
    assert (leader.due, leader.must_stop) == (None, False), "nobody is stopped for it"
    for worker in (0, 1):
        leader.ended(worker, 0, end, 500.0)
    leader.ended(2, 0, exited(ExitCode.STOPPED, 2), 500.0)
    leader.tick(501.0)
    assert (leader.left, leader.awaited) == (None, {2})
    assert leader.joins(2, 0, 510.0, replacement=1)
    leader.tick(510.0)
    assert leader.generation == 1


def test_a_rank_that_was_asked_to_stop_in_no_departing_pod_ends_all_pods() -> None:
    leader = a_leader()
    all_end(leader, *(exited(ExitCode.STOPPED, worker) for worker in range(3)))
    assert leader.left is not None
    assert leader.left.why == "Stopped is not for this pod to repair"


@pytest.mark.parametrize("end", [exited(ExitCode.INVALID_CONFIGURATION), exited(ExitCode.DISK_FULL)])
def test_no_replacement_repairs_what_failed_in_another_pod(end: PodFailure) -> None:
    leader = a_leader()
    leader.lost(2)
    leader.ended(0, 0, exited(ExitCode.PEER_LOST, 0), 0.0)
    leader.ended(1, 0, end, 0.0)
    assert leader.joins(2, 0, 1.0, replacement=1)
    assert leader.left is not None


def test_lost_pods_use_up_no_restart_of_ranks() -> None:
    leader = a_leader(restarts=1, backoff=0)
    for number in (1, 2, 3):
        lost_pod(leader)
        assert leader.joins(2, 0, 0.0, replacement=number)
        leader.tick(0.0)
        assert leader.generation == number
    all_end(leader, killed(0), killed(1), killed(2))
    leader.tick(0.0)
    assert (leader.generation, leader.left) == (4, None)
    all_end(leader, killed(0), killed(1), killed(2))
    assert leader.left is not None


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


def test_a_member_without_a_connection_ends_as_without_the_setting() -> None:
    member = Member()
    member.failed()
    assert member.left is not None
    waiting = Member()
    waiting.connected()
    waiting.ended(killed())
    assert waiting.left is None
    waiting.lost()
    assert waiting.left is not None
    trains = Member()
    trains.connected()
    trains.lost()
    assert trains.left is None


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


def test_a_replacement_starts_its_ranks_when_it_is_ordered_to_in_whatever_generation() -> None:
    member = Member(replacement=4)
    member.connected()
    assert [(order.kind, order.replacement) for order in member.orders] == [(Kind.JOINS, 4)]
    assert member.generation == 0
    member.receive(Message(kind=Kind.START, generation=7))
    assert (member.generation, member.left) == (7, None)
    for late in (Message(kind=Kind.START, generation=8), Message(kind=Kind.STOP, generation=0), leaves(0, "late")):
        member.receive(late)
    assert (member.generation, member.must_stop, member.left) == (7, False, None)
    member.lost()
    assert member.left is None, "its ranks train"


def test_a_replacement_that_waits_ends_with_its_connection_and_with_the_gang() -> None:
    for end in (Member.lost, lambda member: member.receive(leaves(3, "for a reason"))):
        member = Member(replacement=1)
        member.connected()
        end(member)
        member.receive(Message(kind=Kind.START, generation=1))
        assert member.left is not None
        assert member.generation == 0


def test_a_member_departs_alone() -> None:
    member = Member()
    member.connected()
    member.orders.clear()
    member.depart("SIGTERM to the pod")
    member.ended(exited(ExitCode.STOPPED))
    assert [order.kind for order in member.orders] == [Kind.DEPARTS]
    assert member.left is not None


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


ENDS = st.sampled_from([killed(0), killed(2, signaled=True), exited(ExitCode.PEER_LOST), exited(3), exited(81)])


class Network(RuleBasedStateMachine):
    """Pods whose messages come late, never, again or in another order, whose connections and ranks end at will, and
    that are lost and replaced. What is sent over the connection of a former pod reaches no other one."""

    @initialize(workers=st.integers(2, 4))
    def begin(self, workers: int) -> None:
        self.now = 0.0
        self.leader = Leader(workers, Limits(4, 1), WINDOW, PATIENCE, LONGEST)
        self.members = {worker: Member() for worker in range(1, workers)}
        self.ranks: list[int | None] = [0] * workers
        """The generation of each pod's ranks; None: they have ended."""
        self.lives = dict.fromkeys(self.members, 0)
        self.up: list[tuple[int, int, Message]] = []
        self.down: list[tuple[int, int, Message]] = []
        self.joined = dict.fromkeys(self.members, 0)
        """The life of each pod that the leader has a connection to."""
        for worker, member in self.members.items():
            member.connected()
            assert self.leader.joins(worker, 0, self.now)
        self.settle()

    def settle(self) -> None:
        """What agents do at once: they send their orders, and start ranks."""
        for order in self.leader.orders:
            self.down += [(worker, life, order) for worker, life in self.joined.items()]
        self.leader.orders.clear()
        for worker, member in self.members.items():
            self.up += [(worker, self.lives[worker], order) for order in member.orders]
            member.orders.clear()
        for worker, agent in enumerate([self.leader, *self.members.values()]):
            if self.ranks[worker] is None and agent.generation > self.started[worker]:
                self.ranks[worker] = self.started[worker] = agent.generation

    @property
    def started(self) -> list[int]:
        return self.__dict__.setdefault("_started", [0] * len(self.ranks))

    def agent(self, worker: int) -> Leader | Member:
        return self.members[worker] if worker else self.leader

    @rule(data=st.data(), end=ENDS)
    def ranks_end(self, data: st.DataObject, end: PodFailure) -> None:
        worker = data.draw(st.sampled_from(range(len(self.ranks))))
        generation, self.ranks[worker] = self.ranks[worker], None
        if generation is None:
            return
        if worker:
            self.members[worker].ended(end)
        else:
            self.leader.ended(0, self.leader.generation, end, self.now)
        self.settle()

    @rule(data=st.data())
    def a_rank_fails(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(range(len(self.ranks))))
        if self.ranks[worker] is None:
            return
        if worker:
            self.members[worker].failed()
        else:
            self.leader.failed(0, self.leader.generation, self.now)
        self.settle()

    @precondition(lambda self: self.up)
    @rule(data=st.data(), last=st.booleans())
    def the_leader_hears(self, data: st.DataObject, last: bool) -> None:
        self.hear(*(self.up[-1] if last else data.draw(st.sampled_from(self.up))))
        self.settle()

    def hear(self, worker: int, life: int, message: Message) -> None:
        if message.kind is Kind.JOINS:
            if self.leader.joins(worker, message.generation, self.now, message.replacement):
                self.joined[worker] = life
        elif life != self.joined[worker]:
            return
        elif message.kind is Kind.DEPARTS:
            self.leader.departs(worker)
        elif message.kind is Kind.FAILED:
            self.leader.failed(worker, message.generation, self.now)
        elif message.failure is not None:
            self.leader.ended(worker, message.generation, message.failure, self.now)
        elif message.generation == self.leader.generation:
            self.leader.leave(message.why)

    @rule(end=ENDS)
    def all_goes_well(self, end: PodFailure, but: int | None = None) -> None:
        """A whole restart, of those that still take part. but: the ranks of this worker go on."""
        for worker in range(len(self.ranks)):
            if self.ranks[worker] is not None and worker != but:
                self.ranks[worker] = None
                if worker:
                    self.members[worker].ended(end)
                else:
                    self.leader.ended(0, self.leader.generation, end, self.now)
        self.settle()
        for worker, life, message in self.up[-2 * len(self.ranks) :]:
            if message.failure is not None:
                self.hear(worker, life, message)
        self.time_passes(10.0)
        self.all_members_hear_the_last_order()

    @rule(data=st.data(), noticed=st.booleans(), end=ENDS, hears=st.booleans())
    def a_pod_is_lost_and_replaced(self, data: st.DataObject, noticed: bool, end: PodFailure, hears: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.members)))
        if noticed:
            self.leader.lost(worker)
        self.ranks[worker], self.started[worker] = None, 0
        self.lives[worker] += 1
        self.members[worker] = Member(self.lives[worker])
        self.members[worker].connected()
        self.settle()
        if hears:
            self.hear(*self.up[-1])
            self.all_goes_well(end)

    @rule(data=st.data(), end=ENDS)
    def a_pod_is_cut_off(self, data: st.DataObject, end: PodFailure) -> None:
        worker = data.draw(st.sampled_from(sorted(self.members)))
        self.leader.lost(worker)
        self.all_goes_well(end, but=worker)

    @rule(data=st.data())
    def a_pod_departs(self, data: st.DataObject) -> None:
        self.members[data.draw(st.sampled_from(sorted(self.members)))].depart("SIGTERM")
        self.settle()

    @rule()
    def the_leader_hears_all_in_order(self) -> None:
        for worker, life, message in list(self.up):
            if message.failure is not None:
                self.hear(worker, life, message)
        self.settle()

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def a_member_hears(self, data: st.DataObject) -> None:
        self.receive(*data.draw(st.sampled_from(self.down)))
        self.settle()

    def receive(self, worker: int, life: int, message: Message) -> None:
        if life == self.lives[worker]:
            self.members[worker].receive(message)

    @rule()
    def all_members_hear_the_last_order(self) -> None:
        for worker, life, message in self.down[-len(self.members) :]:
            self.receive(worker, life, message)
        self.settle()

    @rule(data=st.data(), here=st.booleans(), there=st.booleans(), again=st.booleans())
    def a_connection_ends(self, data: st.DataObject, here: bool, there: bool, again: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.members)))
        if here:
            self.leader.lost(worker)
        if there:
            self.members[worker].lost()
            if again and self.members[worker].left is None:
                self.members[worker].connected()
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 10.0, 59.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.leader.tick(self.now)
        self.settle()

    @invariant()
    def all_ranks_that_run_are_of_one_generation(self) -> None:
        assert len({generation for generation in self.ranks if generation is not None}) <= 1, self.ranks

    @invariant()
    def nobody_waits_for_a_connection_that_is_gone(self) -> None:
        for member in self.members.values():
            assert member._connected or not member._failed or member.left is not None

    @invariant()
    def the_leader_never_waits_for_longer_than_its_patience(self) -> None:
        leader = self.leader
        if leader.left is None and leader._failed_at is not None and leader._start_at is None:
            assert leader.due is not None
            assert leader.due <= leader._failed_at + (LONGEST if leader.awaited else PATIENCE)


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
