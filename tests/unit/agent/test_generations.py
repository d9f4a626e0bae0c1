"""Generations from end to end: agents, ranks and two operators, whatever becomes of their messages and processes."""

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.soak import SOAK
from tests.suites import GATE
from tests.unit.decide.cluster import member

from .whole_gang import WORKERS
from .whole_job import WholeJob
from .whole_operators import Replica, answered

INDEX = st.integers(0, WORKERS - 1)
OTHERS = st.integers(1, WORKERS - 1)
WHICH = st.integers(0, 1)
FIRST = st.integers(0, 3)
"""Which of several: the first, or a later one where there is one."""


class Generations(WholeJob, RuleBasedStateMachine):
    """One job of three pods, which restarts in place, and two operators, of which the second one has taken over."""

    @initialize(max_restarts=st.integers(1, 4), backoff=st.sampled_from([0, 10]))
    def apply(self, max_restarts: int, backoff: int) -> None:
        self.begin(max_restarts, backoff)

    # What goes well

    @rule(rounds=st.integers(1, 6))
    def things_go_well(self, rounds: int) -> None:
        self.all_is_well(rounds)

    # Ranks and pods

    @rule(steps=st.integers(1, 20))
    def ranks_train(self, steps: int) -> None:
        self.gang.train(steps)

    @rule()
    def a_checkpoint_is_made(self) -> None:
        self.gang.save()

    @rule(index=INDEX, first=FIRST, code=st.sampled_from([137, 1, 139]))
    def a_rank_dies(self, index: int, first: int, code: int) -> None:
        pod = self.pod(index, first)
        if pod is not None and pod.rank is not None:
            self.failures += 1
            self.gang.rank_ends(pod, code, leaves_state=False)
            self.gang.settle()

    @rule()
    def ranks_notice_that_others_are_gone(self) -> None:
        self.gang.peers_notice()

    @rule(index=INDEX)
    def a_pod_is_killed(self, index: int) -> None:
        pod = self.gang.current(index)
        if pod is not None:
            self.failures += 1
            self.gang.exits(pod, 137, None)

    @rule(index=INDEX, lives_on=st.booleans())
    def a_pod_is_removed_by_force(self, index: int, lives_on: bool) -> None:
        """lives_on: on a node that nobody reaches."""
        pod = self.gang.current(index)
        if pod is None:
            return
        self.failures += 1
        self.server.remove_pod(pod.name)
        if lives_on:
            pod.apart = True
        else:
            self.gang.end_pod(pod)

    @rule(index=INDEX, ends=st.booleans())
    def a_node_is_back(self, index: int, ends: bool) -> None:
        """ends: its kubelet has ended the pod, which the API server has not any more."""
        for pod in [pod for pod in self.gang.of(index) if pod.apart]:
            pod.apart = False
            if ends:
                self.gang.end_pod(pod)

    @rule(index=INDEX, first=FIRST)
    def an_agent_is_stopped(self, index: int, first: int) -> None:
        pod = self.pod(index, first)
        if pod is not None:
            self.disturbances += 1
            pod.stopped = True

    @rule(index=INDEX)
    def stopped_agents_go_on(self, index: int) -> None:
        for pod in self.gang.of(index):
            pod.stopped = False
        self.gang.settle()

    @rule()
    def kubelets_look(self) -> None:
        self.gang.kubelets_look()

    @rule(seconds=st.sampled_from([0.5, 1.0, 10.0, 59.0, 70.0, 900.0]))
    def time_passes(self, seconds: float) -> None:
        self.gang.pass_time(seconds)

    # Connections between agents

    @rule(index=OTHERS, first=FIRST, leader=FIRST)
    def an_agent_connects(self, index: int, first: int, leader: int) -> None:
        """With whoever leads, as far as it is told: that may be a pod of long ago."""
        pod, other = self.pod(index, first), self.pod(0, leader)
        if pod is not None and other is not None:
            self.disturbances += 1
            self.gang.connect(pod, other)

    @precondition(lambda self: self.gang.links)
    @rule(data=st.data(), at_leader=st.booleans(), at_member=st.booleans())
    def a_connection_ends(self, data: st.DataObject, at_leader: bool, at_member: bool) -> None:
        """What it has not delivered is lost where nobody hears it any more."""
        self.disturbances += 1
        link = data.draw(st.sampled_from(self.gang.links[-6:]))
        self.gang.closes(link, at_leader=at_leader, at_member=at_member)

    @precondition(lambda self: any(link.up or link.down for link in self.gang.links[-12:]))
    @rule(data=st.data(), count=st.integers(1, 4))
    def agents_hear(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            ways = [(link, True) for link in self.gang.links[-12:] if link.up]
            ways += [(link, False) for link in self.gang.links[-12:] if link.down]
            if ways:
                link, up = data.draw(st.sampled_from(ways))
                self.gang.hear(link, up=up)

    # Operators

    @rule()
    def another_operator_takes_over(self) -> None:
        """The former one goes on with what it knows, until a write of it is refused."""
        self.operators = [self.operators[-1], Replica(self.server)]

    @rule(which=WHICH)
    def an_operator_decides(self, which: int) -> None:
        operator = self.operator(which)
        if not operator.requests:
            operator.look()

    @rule(which=WHICH, count=st.integers(1, 6))
    def its_requests_arrive(self, which: int, count: int) -> None:
        operator = self.operator(which)
        for _ in range(count):
            if operator.requests:
                self.arrives(operator)

    @rule(which=WHICH, count=st.integers(1, 6))
    def events_arrive(self, which: int, count: int) -> None:
        self.operator(which).deliver(count)

    @rule(which=WHICH)
    def an_operator_sees_all(self, which: int) -> None:
        self.operator(which).sees_all()

    @rule(which=WHICH)
    def an_agent_is_asked(self, which: int) -> None:
        self.ask(self.operator(which))

    @rule(which=WHICH, rank=st.none() | INDEX)
    def the_answer_arrives(self, which: int, rank: int | None) -> None:
        self.answer(self.operator(which), rank)

    @rule(which=WHICH)
    def the_answer_is_lost(self, which: int) -> None:
        self.operator(which).answer = None

    @rule(which=WHICH, how=st.sampled_from(["arrives", "arrives twice", "is lost", "its answer is lost"]))
    def an_order(self, which: int, how: str) -> None:
        operator = self.operator(which)
        if not operator.sent:
            return
        order = operator.sent[0]
        if how == "is lost":
            operator.sent.remove(order)
            answered(order, None)
            return
        if how == "arrives twice":
            self.follow(order)
        self.the_order_arrives(operator, order, heard=how != "its answer is lost")

    # What is common on a cluster and rare in a drawn order of rules

    @rule(
        kind=st.sampled_from(["rank", "pod", "hang"]),
        index=INDEX,
        twice=st.booleans(),
        another=st.sampled_from(["never", "before", "amid"]),
    )
    def one_failure_is_one_restart(self, kind: str, index: int, twice: bool, another: str) -> None:
        """The job trains, with restarts left; whichever operator sees it, and however often it orders one."""
        for worker in range(WORKERS):
            self.stopped_agents_go_on(worker)
        self.all_is_well()
        if not self.is_calm or self.is_finished:
            return
        self.gang.train(1)
        self.gang.save()
        self.all_is_well(2)
        before = self.restarts()
        if another == "before":
            self.another_operator_takes_over()
        if kind == "rank":
            self.a_rank_dies(index, 0, 137)
        elif kind == "pod":
            self.a_pod_is_killed(index)
        else:
            self.the_gang_hangs([0, 1] if twice else [1], index, twice=twice)
        if another == "amid":
            self.another_operator_takes_over()
        for _ in range(4):
            self.all_is_well()
        assert self.is_calm
        assert self.restarts() == before + 1

    @rule(which=st.sampled_from([[0], [1], [0, 1], [1, 0]]), rank=st.none() | INDEX, twice=st.booleans())
    def the_gang_hangs(self, which: list[int], rank: int | None, *, twice: bool) -> None:
        """And these operators see it, each by itself."""
        self.gang.pass_time(120)
        for one in which:
            self.decides_from_an_answer(self.operator(one), rank)
        for one in which:
            while self.operator(one).requests:
                self.arrives(self.operator(one))
        for one in which:
            self.an_order(one, "arrives twice" if twice else "arrives")

    @rule(all_pods=st.booleans())
    def an_order_comes_late(self, all_pods: bool) -> None:
        """It is for ranks of before, which had done the same step as those that hear it."""
        self.all_is_well()
        self.gang.save()
        self.gang.pass_time(120)
        operator = self.operators[-1]
        self.decides_from_an_answer(operator, 1)
        while operator.requests:
            self.arrives(operator)
        self.another_operator_takes_over()
        for index in range(WORKERS):
            if all_pods:
                self.a_pod_is_killed(index)
            else:
                self.a_rank_dies(index, 0, 137)
        self.all_is_well(steps=0)
        self.an_order(0, "arrives twice")

    @rule(steps=st.integers(1, 30), dies=st.none() | INDEX)
    def a_former_operator_goes_on(self, steps: int, dies: int | None) -> None:
        """It has asked an agent before the other one took over, and the answer comes when much has happened."""
        self.everything_arrives()
        self.gang.train(steps)
        self.another_operator_takes_over()
        self.operators[0].answer = None
        self.an_agent_is_asked(0)
        self.gang.train(steps)
        if dies is not None:
            self.a_rank_dies(dies, 0, 137)
        self.all_is_well()
        self.operators[0].sees_all()
        self.the_answer_arrives(0, None)
        for _ in range(2):
            self.an_operator_decides(0)
            self.its_requests_arrive(0, 6)

    @rule(
        found_by=st.lists(OTHERS, min_size=1, unique=True),
        dies=st.sampled_from(["none", "its rank", "another"]),
        amid=st.booleans(),
    )
    def a_former_pod_of_worker_0_is_found(self, found_by: list[int], dies: str, amid: bool) -> None:
        """It was replaced while nobody reached its node, and lives. amid: it has begun a generation meanwhile."""
        former = self.gang.current(0)
        if former is None:
            return
        if amid:
            self.all_is_well()
            self.a_rank_dies(1, 0, 137)
            self.gang.peers_notice()
            for link in list(former.links.values()):
                while self.gang.hear(link, up=True):
                    pass
        self.a_pod_is_removed_by_force(0, lives_on=True)
        self.all_is_well()
        self.a_node_is_back(0, ends=False)
        for index in found_by:
            pod = self.gang.current(index)
            if pod is not None and pod.link is not None:
                self.disturbances += 1
                self.gang.closes(pod.link, at_leader=True, at_member=True)
                self.gang.connect(pod, former)
                self.all_links_deliver()
        if dies == "its rank" and former.rank is not None:
            self.gang.rank_ends(former, 137)
        elif dies == "another":
            self.a_rank_dies(found_by[0], 0, 137)
        for seconds in (2.0, 20.0):
            self.gang.pass_time(seconds)
            self.all_links_deliver()

    # What always holds

    @invariant()
    def what_the_status_counts_only_grows(self) -> None:
        status = self.status_of(self.server.job)
        life = status.attempt, self.in_place(status)
        assert life >= self.life
        assert status.restarts >= self.status.restarts
        self.life, self.status = life, status

    @invariant()
    def ranks_of_one_attempt_that_run_are_of_one_generation(self) -> None:
        lives = {(pod.attempt, pod.rank) for pod in self.gang.pods if pod.rank is not None and self.gang.is_known(pod)}
        newest = max((attempt for attempt, _ in lives), default=0)
        assert len({life for life in lives if life[0] == newest}) <= 1, lives

    @invariant()
    def every_generation_is_newer(self) -> None:
        assert all(former[:2] <= life[:2] for former, life in pairwise(self.gang.effects))

    @invariant()
    def no_restart_is_without_a_cause(self) -> None:
        status = self.status_of(self.server.job)
        assert status.restarts <= self.failures + self.disturbances

    def teardown(self) -> None:
        """Once all is delivered, the job trains or has ended, and the status says which."""
        if not hasattr(self, "gang"):
            return
        for pod in self.gang.pods:
            pod.stopped = False
            if pod.apart:
                self.gang.end_pod(pod)
        self.operators = [Replica(self.server)]
        for _ in range(8):
            self.all_is_well(12)
            if self.is_calm:
                break
            self.gang.pass_time(120)
        if self.is_finished:
            return
        self.gang.train(1)
        group = self.gang.group()
        assert group, self.server.job["status"]
        self.everything_arrives()
        self.everything_arrives()
        status = self.status_of(self.server.job)
        assert status.attempt == group[0].attempt == max(member(pod)[2] for pod in self.server.pods.values())
        assert (status.attempt, self.in_place(status)) == (group[0].attempt, group[0].rank)
        assert status.progress is not None
        assert status.progress.step == len(self.gang.effects) == group[0].step


Generations.TestCase.settings = settings(
    max_examples=1500 if SOAK else 10 if GATE else 150, stateful_step_count=60 if SOAK else 25, deadline=None
)
test_generations = pytest.mark.timeout(3600 if SOAK else 300)(Generations.TestCase)

Course = Callable[[Generations], None]
COURSES: dict[str, Course] = {
    "a rank": lambda job: job.one_failure_is_one_restart("rank", 1, twice=False, another="amid"),
    "a pod": lambda job: job.one_failure_is_one_restart("pod", 2, twice=False, another="before"),
    "worker 0's pod": lambda job: job.one_failure_is_one_restart("pod", 0, twice=False, another="never"),
    "a hang that both operators see": lambda job: job.one_failure_is_one_restart(
        "hang", 1, twice=True, another="before"
    ),
    "an order of a former generation": lambda job: job.an_order_comes_late(all_pods=False),
    "an order of a former attempt": lambda job: job.an_order_comes_late(all_pods=True),
    "late answers": lambda job: job.a_former_operator_goes_on(20, None),
    "answers of a former generation": lambda job: job.a_former_operator_goes_on(20, 1),
    "a former leader, whose rank dies": lambda job: job.a_former_pod_of_worker_0_is_found(
        [1, 2], "its rank", amid=True
    ),
    "a former leader of some": lambda job: job.a_former_pod_of_worker_0_is_found([1], "another", amid=True),
    "a former leader that is behind": lambda job: job.a_former_pod_of_worker_0_is_found([1, 2], "another", amid=False),
}


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_a_course_that_chance_takes_seldom(course: Course) -> None:
    job = Generations()
    job.apply(max_restarts=4, backoff=10)
    job.all_is_well()
    course(job)
    job.what_the_status_counts_only_grows()
    job.ranks_of_one_attempt_that_run_are_of_one_generation()
    job.every_generation_is_newer()
    job.no_restart_is_without_a_cause()
    job.teardown()
