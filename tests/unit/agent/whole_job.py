"""A job with its pods and two operators, and what the status of it must say of steps and restarts."""

from typing import Any

from disttrain_agent.restart import Limits
from disttrain_api.report import RankPhase
from disttrain_api.status import GoodputState, JobStatus
from disttrain_api.times import timestamp
from disttrain_operator.decide.live import Blame
from disttrain_operator.decide.observed import job_facts
from tests.builders import NOW, a_claim_template, a_raw_job
from tests.unit.decide.cluster import Server

from .whole_gang import WORKERS, Gang, Pod
from .whole_operators import Order, Replica, answered


class WholeJob:
    """One job of three pods, which restarts in place, and two operators, of which the second one has taken over."""

    def begin(self, max_restarts: int, backoff: int) -> None:
        """The job is applied, and trains."""
        policy = {
            "maxRestarts": max_restarts,
            "restartBackoffSeconds": backoff,
            "restartStrategy": "InPlace",
            "progressDeadlineSeconds": 60,
        }
        job = a_raw_job(workers={"replicas": WORKERS}, runPolicy=policy, storage=a_claim_template())
        assert job_facts(job).problems == ()
        job["metadata"]["creationTimestamp"] = timestamp(NOW)
        self.server = Server(job)
        self.gang = Gang(self.server, Limits(max_restarts, backoff))
        self.operators = [Replica(self.server)]
        """The last one leads. The one before may not know yet that it does not."""
        self.status = JobStatus()
        self.life = 0, 0
        self.failures = self.disturbances = 0
        self.all_is_well()

    def all_is_well(self, rounds: int = 12, steps: int = 1) -> None:
        """Everything that is on its way arrives, in its order, and everybody does what is theirs to do."""
        for _ in range(rounds):
            self.everything_arrives()
            self.gang.peers_notice()
            self.gang.pass_time(15)
            self.gang.train(steps)
            if self.is_calm:
                return

    @property
    def is_calm(self) -> bool:
        """Whether all ranks train, and the status knows it."""
        group, status = self.gang.group(), self.status_of(self.server.job)
        if self.is_finished:
            return True
        if not group or status.progress is None or any(link.up or link.down for link in self.gang.links):
            return False
        known = status.attempt, self.in_place(status), status.progress.phase
        return known == (group[0].attempt, group[0].rank, RankPhase.TRAINING) and not self.operators[-1].requests

    def everything_arrives(self) -> None:
        operator = self.operators[-1]
        for order in list(operator.sent):
            self.the_order_arrives(operator, order)
        self.ask(operator)
        self.answer(operator, None)
        operator.sees_all()
        for _ in range(20):
            if not operator.requests and not operator.look():
                break
            while operator.requests:
                self.arrives(operator)
            operator.deliver(1000)
        self.gang.kubelets_look()
        for index in range(1, WORKERS):
            first, pod = self.gang.current(0), self.gang.current(index)
            if first is not None and pod is not None and (pod.link is None or pod.link.leader is not first):
                self.gang.connect(pod, first)
        self.all_links_deliver()

    def all_links_deliver(self) -> None:
        self.gang.links = [link for link in self.gang.links if link.member.alive and link.leader.alive]
        for _ in range(4):
            for link in self.gang.links:
                while self.gang.hear(link, up=True):
                    pass
                while self.gang.hear(link, up=False):
                    pass

    def the_order_arrives(self, operator: Replica, order: Order, *, heard: bool = True) -> None:
        operator.sent.remove(order)
        found = self.follow(order)
        answered(order, found if heard else None)

    def follow(self, order: Order) -> bool | str | None:
        """The agent that is at the order's address by now hears it; None: none is there."""
        pod = self.at(order.agent)
        if pod is None or pod.stopped:
            return None
        hung = self.gang.group()
        found = pod.restart(order.path, self.gang.now)
        if found is True:
            self.failures += 1
            assert pod in hung, "it is for ranks that train"
            life = f"attempt={pod.attempt}&generation={pod.rank}&step={pod.report.step if pod.report else None}"
            assert life in order.path, "an order of another life is followed"
        self.gang.settle()
        return found

    def arrives(self, operator: Replica) -> None:
        before = self.server.job
        operator.arrives()
        if self.server.job is not before:
            self.audit(self.status_of(before), self.status_of(self.server.job))

    def audit(self, before: JobStatus, after: JobStatus) -> None:
        """What the job's status says of steps and restarts."""
        assert before.goodput is None or after.goodput is not None
        furthest = before.goodput.furthest_step if before.goodput is not None else 0
        assert after.goodput is not None
        assert furthest <= after.goodput.furthest_step <= self.gang.furthest
        progress, life = after.progress, (after.attempt, self.in_place(after))
        if progress is not None and progress.phase == RankPhase.TRAINING and after.goodput.state is not None:
            redone = progress.step < furthest
            assert redone == (after.goodput.state == GoodputState.REDOING) or after.goodput.state not in (
                GoodputState.TRAINING, GoodputState.REDOING,
            )  # fmt: skip
            former = before.progress
            if former is not None and (before.attempt, self.in_place(before)) == life:
                assert progress.step >= former.step or former.phase != RankPhase.TRAINING, "no step is taken back"
        for attempt in after.attempts:
            assert (attempt.restarts_in_place or 0) <= self.gang.decided.get(attempt.number, 0)

    @property
    def is_finished(self) -> bool:
        ends = {entry.type: entry.status for entry in self.status_of(self.server.job).conditions}
        return ends.get("Finished") == "True"

    @staticmethod
    def status_of(job: dict[str, Any]) -> JobStatus:
        return JobStatus.model_validate(job.get("status") or {})

    @staticmethod
    def in_place(status: JobStatus) -> int:
        return (status.attempts[-1].restarts_in_place or 0) if status.attempts else 0

    def restarts(self) -> int:
        """How often the job has started again, in place or not, as its status says."""
        status = self.status_of(self.server.job)
        replaced = sum(len(entry.replacements) for entry in status.attempts)
        return status.restarts - replaced + sum(entry.restarts_in_place or 0 for entry in status.attempts)

    def operator(self, which: int) -> Replica:
        return self.operators[min(which, len(self.operators) - 1)]

    def pod(self, index: int, first: int) -> Pod | None:
        found = self.gang.of(index)
        return found[min(first, len(found) - 1)] if found else None

    def at(self, agent: Any) -> Pod | None:
        """Who has the address of an agent by now: a pod that lives elsewhere is not reached."""
        pod = self.gang.current(agent.index)
        return None if pod is None or pod.apart else pod

    def ask(self, operator: Replica) -> None:
        """The agent of worker 0's pod answers; the answer is on its way."""
        agent = operator.first_agent()
        pod = None if agent is None else self.at(agent)
        if agent is not None and pod is not None and not pod.stopped and operator.answer is None:
            operator.answer = agent, pod.status()

    def answer(self, operator: Replica, rank: int | None) -> None:
        """The answer arrives. rank: the one that the others seem to wait for, if none gets on."""
        if operator.answer is not None:
            (agent, answer), operator.answer = operator.answer, None
            operator.learns(agent, answer, Blame(rank, "waits", awaited=rank is not None))

    def decides_from_an_answer(self, operator: Replica, rank: int | None) -> None:
        """It sees all there is, asks worker 0's agent, and has its requests ready."""
        operator.sees_all()
        operator.requests.clear()
        operator.answer = None
        self.ask(operator)
        self.answer(operator, rank)
        operator.look()
