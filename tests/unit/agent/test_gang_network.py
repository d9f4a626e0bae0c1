"""What holds of a gang whatever its network, its ranks and its pods do."""

from collections.abc import Collection

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disttrain_agent.gang.leader import Leader
from disttrain_agent.gang.member import Member
from disttrain_agent.gang.messages import Kind, Message, PodFailure
from disttrain_agent.restart import Limits
from disttrain_api.names import ExitCode, Reason
from tests.suites import examples

from .test_gang_decisions import LONGEST, PATIENCE, WINDOW, exited, killed

LIMITS = Limits(2, 1)
ENDS = st.sampled_from([killed(0), killed(2, signaled=True), exited(ExitCode.PEER_LOST), exited(3), exited(81)])


Ends = tuple[int, int]
"""A connection's key: which life of the pod it belongs to, and which one of worker 0's pod."""


class Network(RuleBasedStateMachine):
    """Pods whose messages come late, never, again or in another order, whose connections and ranks end at will, and
    that are lost and replaced, worker 0's too. What is sent over the connection of a former pod reaches no other."""

    @initialize(workers=st.integers(2, 4))
    def begin(self, workers: int) -> None:
        self.now = 0.0
        self.leader = Leader(workers, LIMITS, WINDOW, PATIENCE, LONGEST)
        self.members = {worker: Member(longest=LONGEST) for worker in range(1, workers)}
        self.ranks: list[int | None] = [0] * workers
        """The generation of each pod's ranks; None: they have ended."""
        self.lives = dict.fromkeys(range(workers), 0)
        self.up: list[tuple[int, Ends, Message]] = []
        self.down: list[tuple[int, Ends, Message]] = []
        self.joined = dict.fromkeys(self.members, 0)
        """The life of each pod that the leader has a connection to."""
        self.found = dict.fromkeys(self.members, 0)
        """The life of worker 0's pod that each other one has connected to last."""
        self.restarts = 0
        """Counts restarts of ranks, without those after a lost pod; none has a new checkpoint."""
        for worker, member in self.members.items():
            member.connected()
            assert self.leader.joins(worker, 0, self.now)
        self.settle()

    def settle(self) -> None:
        """What agents do at once: they send their orders, and start ranks."""
        for order in self.leader.orders:
            self.down += [(worker, (life, self.lives[0]), order) for worker, life in self.joined.items()]
            if order.kind is Kind.START:
                restart = self.leader.restart
                assert restart is not None
                assert restart.count == order.generation
                self.restarts += restart.cause.reason != Reason.POD_LOST
        self.leader.orders.clear()
        for worker, member in self.members.items():
            self.up += [(worker, (self.lives[worker], self.found[worker]), order) for order in member.orders]
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

    def hear(self, worker: int, ends: Ends, message: Message) -> None:
        life, leader = ends
        if leader != self.lives[0]:
            return
        if message.kind is Kind.JOINS:
            taken, answer = self.leader.admit(worker, message, self.now)
            if taken:
                self.joined[worker] = life
            if answer is not None and taken:
                self.down.append((worker, ends, answer))
        elif life == self.joined.get(worker):
            self.leader.receive(worker, message, self.now)

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
        for worker, ends, message in self.up[-2 * len(self.ranks) :]:
            if message.failure is not None:
                self.hear(worker, ends, message)
        self.time_passes(10.0)
        self.all_members_hear_the_last_order()

    @rule(data=st.data(), noticed=st.booleans(), end=ENDS, hears=st.booleans())
    def a_pod_is_lost_and_replaced(self, data: st.DataObject, noticed: bool, end: PodFailure, hears: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.members)))
        self.replace(worker, noticed=noticed, hears=hears)
        if hears:
            self.all_goes_well(end)

    def replace(self, worker: int, *, noticed: bool = True, hears: bool = True) -> None:
        """A pod is lost, and another one in its place connects. noticed, hears: by the leader."""
        if noticed:
            self.leader.lost(worker)
        self.ranks[worker], self.started[worker] = None, 0
        self.lives[worker] += 1
        self.members[worker] = Member(self.lives[worker], LONGEST)
        self.connect(worker)
        self.settle()
        if hears:
            self.hear(*self.up[-1])

    def connect(self, worker: int) -> None:
        self.found[worker] = self.lives[0]
        self.members[worker].connected()

    @rule(before=st.integers(0, 3), after=st.integers(0, 3), but=st.none() | st.integers(1, 3), new=st.booleans())
    def another_leader_comes_between_restarts(self, before: int, after: int, but: int | None, new: bool) -> None:
        """but: the ranks of this worker go on at first. new: its pod is a replacement itself."""
        for _ in range(before):
            self.all_goes_well(killed(0))
        if new and but in self.members:
            self.replace(but)
            self.all_goes_well(killed(0))
        self.lose_the_leader(self.members)
        self.all_goes_well(killed(2), but)
        for _ in range(after):
            self.all_goes_well(killed(0))

    @rule(data=st.data())
    def worker_0s_pod_is_lost_and_replaced(self, data: st.DataObject) -> None:
        """Some find the new pod, and what the former one has sent may still come to others."""
        self.lose_the_leader({worker for worker in self.members if data.draw(st.booleans())}, heard=False)

    def lose_the_leader(self, found_by: Collection[int], *, heard: bool = True) -> None:
        """Worker 0's pod is lost, and another one in its place is found by these. heard: it hears what they say."""
        self.ranks[0], self.started[0] = None, 0
        self.lives[0] += 1
        self.leader = Leader(
            len(self.ranks), LIMITS, WINDOW, PATIENCE, LONGEST, replacement=self.lives[0], now=self.now
        )
        self.joined.clear()
        sent = len(self.up)
        for worker, member in self.members.items():
            if member.left is None and worker in found_by:
                member.lost(self.now)
                self.connect(worker)
        self.settle()
        for said in self.up[sent:] if heard else ():
            self.hear(*said)
        self.settle()

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
        for worker, ends, message in list(self.up):
            if message.failure is not None:
                self.hear(worker, ends, message)
        self.settle()

    @precondition(lambda self: self.down)
    @rule(data=st.data())
    def a_member_hears(self, data: st.DataObject) -> None:
        self.receive(*data.draw(st.sampled_from(self.down)))
        self.settle()

    def receive(self, worker: int, ends: Ends, message: Message) -> None:
        if ends == (self.lives[worker], self.found[worker]):
            self.members[worker].receive(message)

    @rule()
    def all_members_hear_the_last_order(self) -> None:
        for worker, ends, message in self.down[-len(self.members) :]:
            self.receive(worker, ends, message)
        self.settle()

    @rule(data=st.data(), here=st.booleans(), there=st.booleans(), again=st.booleans())
    def a_connection_ends(self, data: st.DataObject, here: bool, there: bool, again: bool) -> None:
        worker = data.draw(st.sampled_from(sorted(self.members)))
        if here:
            self.leader.lost(worker)
        if there:
            self.members[worker].lost(self.now)
            if again and self.members[worker].left is None:
                self.connect(worker)
        self.settle()

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 10.0, 59.0, LONGEST]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for agent in (self.leader, *self.members.values()):
            agent.tick(self.now)
        self.settle()

    @invariant()
    def all_ranks_that_run_are_of_one_generation(self) -> None:
        assert len({generation for generation in self.ranks if generation is not None}) <= 1, self.ranks

    @invariant()
    def no_lost_leader_gives_back_a_restart_of_ranks(self) -> None:
        assert self.restarts <= LIMITS.restarts

    @invariant()
    def nobody_waits_for_ever_for_a_connection_that_is_gone(self) -> None:
        for member in self.members.values():
            assert member._connected or not member._failed or member.left is not None or member.due is not None

    @invariant()
    def the_leader_never_waits_for_longer_than_its_patience(self) -> None:
        leader = self.leader
        if leader.left is None and leader._failed_at is not None and leader._start_at is None:
            assert leader.due is not None
            assert leader._end_by <= leader._failed_at + LONGEST
            assert leader.due <= (leader._failed_at + LONGEST if leader.awaited else leader._end_by)


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
