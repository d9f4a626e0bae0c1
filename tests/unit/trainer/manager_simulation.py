"""Manager, workers and servers in one process, with crashes, lost answers and former lives between any two messages.

The manager, the workers' memory and each server's record of pushes are the real ones; the network is a list.
"""

import random
from itertools import accumulate

import torch

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_api.training import Optimizer, OptimizerName, Training
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.protocol.progress import TaskProgress, progress_of
from disttrain_trainer.parameter_server.protocol.tasks import CompleteStep, Result, Task
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message
from disttrain_trainer.parameter_server.server.aggregation import Aggregator, Push
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.manager import Manager
from disttrain_trainer.parameter_server.server.shard import Shard
from disttrain_trainer.parameter_server.worker.worker_progress import WorkerProgress
from tests.builders import TRAINING

HEARTBEAT_TIMEOUT = 5.0
SAMPLES = 50
INTERVAL = 4
SGD = Optimizer(name=OptimizerName.SGD, learning_rate=1.0)


def result_of(task, worker=0):
    """Return the result of a task, which is the same whoever does it; some tasks are skipped."""
    in_row = 2 * ((task.step + task.part) % 3 == 0)
    return Result(*((0.0, 0.0) if in_row else (1.0, 2.0)), 3.0, worker, in_row)


class Holder:
    """What one server has taken in, and its last snapshot."""

    def __init__(self, workers):
        self._workers = workers
        self.gradients = self.empty()
        self.snapshot = self.gradients.remembered()
        self.table = None
        self.applied = []
        """Tasks whose update this life and those that it goes on from have made, and not lost."""
        self.kept = []
        self.lives = 1

    def empty(self):
        return Aggregator(Shard([torch.zeros(1)], SGD), self._workers, lambda step: 1.0, together=False)

    def take(self, task, floor):
        if self.gradients.take(Push(task, 1.0, {}, 0, floor)):
            self.applied.append(task)

    def save(self, table=None):
        self.snapshot, self.table, self.kept = self.gradients.remembered(), table, list(self.applied)

    def die(self):
        """Back to the last snapshot; the number of updates that are lost."""
        lost = len(self.applied) - len(self.kept)
        self.gradients = self.empty()
        self.gradients.remember(*self.snapshot)
        self.applied = list(self.kept)
        self.lives += 1
        return lost


class Worker:
    """One worker: what it asks, and what becomes of the answers."""

    def __init__(self, rank, life):
        self.rank, self.life = rank, life
        self.progress = WorkerProgress(rank, f"{rank}-{life}")
        self.number = 0
        self.asked = None
        self.asked_of = None
        """Epoch of the manager that the question was sent to; None: it is to be sent, perhaps once more."""
        self.asleep_until = 0.0
        self.inbox = []
        """Answers that come while it is asleep, with the incarnations that they are from."""
        self.lease = None
        self.floor = 0
        self.incarnation = 0
        self.completed = None
        self.over = False

    def question(self, kind, **fields):
        self.number += 1
        sender = (f"{self.rank}-{self.life}".encode(), b"%d" % self.number)
        self.asked = (
            sender,
            Message(kind, {**fields, "worker": self.rank, "instance": self.progress._fields["instance"]}),
        )
        self.asked_of = None


class Simulation:
    def __init__(self, seed, workers, servers, steps, synchronization, staleness):
        self.chance = random.Random(seed)
        self.workers, self.steps, self.staleness = workers, steps, staleness
        self.synchronization = synchronization
        training = Training.model_validate({**TRAINING, "steps": steps})
        bounded = synchronization is Synchronization.BOUNDED_STALENESS
        configured = ParameterServer(synchronization=synchronization, staleness=staleness if bounded else None)
        self.batch = Batch(micro=2, accumulation=1, world=2 * workers)
        self.config = ServerConfig(0, workers, training, self.batch, configured, heartbeat_timeout=HEARTBEAT_TIMEOUT)
        sampler = Sampler(SAMPLES, training.seed, self.batch, workers)
        self.cursors = list(accumulate(range(1, steps), lambda at, _: sampler.advance(at), initial=Cursor()))
        """Where the data stands before each step."""
        self.now = 0.0
        self.all_counted = True
        """No worker has died, or was taken for dead: then the bound may be counted without the manager."""
        self.managers = {1: Manager(self.config, self.log)}
        """By incarnation: the one at work, and former ones that still answer whoever does not know better."""
        self.incarnation = 1
        self.holders = [Holder(workers) for _ in range(servers)]
        self.members = [Worker(rank, 1) for rank in range(workers)]
        self.dead = set()
        self.lost = 0
        self.deaths = 0
        self.reported = {}
        self.skipped = list(accumulate(
            (sum(result_of(Task(step, part)).in_row > 0 for part in range(workers)) for step in range(steps)), initial=0
        ))  # fmt: skip
        """Tasks before each step of which no update is made."""
        self.counted = 0
        self.most_deaths = 0 if synchronization is Synchronization.SYNC else self.chance.choice([0, 12])
        """Deaths of servers. Each makes workers ask once more, and so hides questions that were forgotten."""
        self.workers_die = self.chance.random() < 0.5
        self.somebody_sleeps = self.chance.random() < 0.5
        self.hold_at = steps if self.chance.random() < 0.5 else self.chance.randint(1, steps)
        for member in self.members:
            member.question("hello", samples=SAMPLES)

    def run(self):
        for _ in range(8000):
            if all(member.over for member in self.members):
                return
            self.act()
        raise AssertionError("it does not end")

    def act(self):
        self.now += self.chance.random() * 0.4
        manager = self.managers[self.incarnation]
        self.deliver(manager.tick(self.now), self.incarnation)
        self.deliver(manager.answers(self.now), self.incarnation)
        fate = self.chance.random()
        if fate < 0.02 and self.deaths < self.most_deaths:
            self.kill_manager()
        elif fate < 0.03 and self.deaths < self.most_deaths:
            holder = self.chance.choice(self.holders[1:] or self.holders)
            if holder is not self.holders[0]:
                self.deaths += 1
                self.lost += holder.die()
        elif fate < 0.05 and self.workers_die:
            self.kill_worker()
        elif fate < 0.07 and self.somebody_sleeps:
            self.sleep()
        awake = [member for member in self.members if member.rank not in self.dead and self.now >= member.asleep_until]
        for member in awake:
            answers, member.inbox = member.inbox, []
            for answer, incarnation in answers:
                self.deliver([answer], incarnation)
            if self.chance.random() < 0.7:
                self.beat(member)
        if awake:
            self.work(self.chance.choice(awake))
        for index, holder in enumerate(self.holders):
            if len(holder.applied) - len(holder.kept) >= INTERVAL:
                holder.save(manager.table() if index == 0 else None)

    def log(self, sentence):
        if "silent" in sentence or ("reports of" in sentence and f"reports of {self.workers} " not in sentence):
            self.all_counted = False

    def kill_manager(self):
        """Dies, or hangs and is replaced: then it may go on answering those who do not know its successor."""
        if not self.members[0].progress._known and not self.managers[self.incarnation].table():
            return
        self.deaths += 1
        self.lost += self.holders[0].die()
        table = self.holders[0].table
        self.incarnation += 1
        self.managers[self.incarnation] = Manager(self.config, self.log)
        self.managers[self.incarnation].recover(table)

    def kill_worker(self):
        rank = self.chance.randrange(self.workers)
        self.all_counted = False
        if rank in self.dead:
            self.dead.discard(rank)
            self.members[rank] = Worker(rank, self.members[rank].life + 1)
            self.members[rank].question("hello", samples=SAMPLES)
        elif not self.members[rank].over:
            self.dead.add(rank)
            if self.chance.random() < 0.5:
                self.managers[self.incarnation].handlers["leave"](
                    (b"leaves", b""), Message("leave", {"worker": rank}), self.now
                )

    def sleep(self):
        """Nobody dies: a worker stands still, or the machine with the manager and all workers."""
        seconds = HEARTBEAT_TIMEOUT * 3 * self.chance.random()
        if self.chance.random() < 0.5:
            self.now += seconds
        else:
            self.chance.choice(self.members).asleep_until = self.now + seconds

    def beat(self, member):
        # A worker that knows a newer manager talks to no other.
        knows_newest = member.incarnation == self.incarnation
        incarnation = self.incarnation if knows_newest or self.chance.random() < 0.7 else max(1, member.incarnation)
        manager = self.managers[incarnation]
        sender = (f"beat-{member.rank}".encode(), b"")
        fields = {"worker": member.rank, "instance": member.progress._fields["instance"]}
        [(_, answer)] = manager.handlers["alive"](sender, Message("alive", fields), self.now)
        if self.is_answered(member, incarnation) and answer.fields["report"] and member.progress.report() is not None:
            manager.handlers["report"](sender, member.progress.report(), self.now)

    def is_answered(self, member, incarnation):
        """False where the answer is that of a manager that was replaced."""
        if incarnation < member.incarnation:
            return False
        if member.asked is not None and member.asked_of is not None and incarnation > member.asked_of:
            self.send(member, incarnation)
        member.incarnation = incarnation
        return True

    def send(self, member, incarnation):
        sender, message = member.asked
        member.asked_of = incarnation
        manager = self.managers[incarnation]
        try:
            self.deliver(manager.handlers[message.kind](sender, message, self.now), incarnation)
        except Malformed as error:
            raise AssertionError(f"{message}: {error}") from error

    def deliver(self, answers, incarnation):
        for (who, number), answer in answers:
            member = self.members[int(who.split(b"-")[0])]
            current = member.asked is not None and member.asked[0] == (who, number)
            if not current or member.rank in self.dead or incarnation < member.incarnation:
                continue
            if self.now < member.asleep_until:
                member.inbox.append((((who, number), answer), incarnation))
                continue
            if self.chance.random() < 0.05:
                # Lost with its connection, of which the worker knows.
                member.asked_of = None
                continue
            member.incarnation = incarnation
            member.asked = None
            self.answered(member, answer)

    def work(self, member):
        if member.over:
            return
        if member.asked is not None:
            if member.asked_of is not None:
                return
            incarnation = self.incarnation if self.chance.random() < 0.8 else max(1, member.incarnation)
            if self.is_answered(member, incarnation):
                self.send(member, incarnation)
        elif member.lease is not None and self.chance.random() < 0.6:
            task, floor = member.lease
            member.lease = None
            for holder in self.holders:
                holder.take(task, floor)
            result = result_of(task, member.rank)
            clock = member.progress.completed(task, result)
            member.completed = (member.completed or 0) + 1
            self.ask(member, done=list(task), clock=clock, **result._asdict())

    def ask(self, member, **fields):
        if member.rank == 0:
            fields["acknowledged"] = member.progress.acknowledge(fields.get("hold_at"))
        member.question("next", **fields)

    def answered(self, member, answer):
        if answer.kind == "welcome":
            member.progress.samples = SAMPLES
            assert answer.fields["skipped"] == self.skipped[answer.fields["step"]]
            if member.rank == 0 and not answer.fields["started"]:
                member.question("start", step=0, epoch=0, position=0, hold_at=self.hold_at, skipped=0)
            else:
                self.ask(member)
            return
        if answer.kind == "started":
            member.progress.started(TaskProgress(0, 0, Cursor(), self.hold_at, 0))
            self.ask(member)
            return
        member.progress.answered(answer)
        known = progress_of(answer.fields["known"])
        assert known.skipped == self.skipped[known.floor]
        for complete in (CompleteStep(*fields) for fields in answer.fields["results"]):
            step, skipped = complete.step, self.skipped[complete.step + 1] - self.skipped[complete.step]
            assert step not in self.reported or member.life > 1, "reported twice"
            assert complete.weight == 2 * complete.loss
            assert complete.loss + complete.skipped == complete.samples / 3 <= self.workers
            # Parts whose results were lost with a manager are not there.
            assert complete.skipped <= skipped
            assert complete.in_row == 2 * (complete.skipped > 0)
            self.reported[step] = complete.loss
        if answer.kind == "task":
            task = Task(*answer.numbers("task"))
            assert Cursor(answer.number("epoch"), answer.number("position")) == self.cursors[task.step]
            if self.synchronization is Synchronization.SYNC:
                earlier = {Task(step, part) for step in range(task.step) for part in range(self.workers)}
                assert all(earlier <= set(holder.applied) for holder in self.holders)
            if self.synchronization is Synchronization.BOUNDED_STALENESS:
                assert answer.number("ahead") <= self.staleness
                # Who joins counts as having done what the slowest has: it learns so with its first task.
                member.completed = max(member.completed or 0, progress_of(answer.fields["known"]).clocks[member.rank])
                done = [one.completed for one in self.members]
                if self.all_counted and None not in done:
                    self.counted += 1
                    assert member.completed - min(done) <= self.staleness
            member.lease = (task, progress_of(answer.fields["known"]).floor)
        elif answer.kind == "hold":
            step = progress_of(answer.fields["known"]).floor
            tasks = {Task(number, part) for number in range(step) for part in range(self.workers)}
            for holder in self.holders:
                # A leader that dies together with the manager takes along to which step that one assigned.
                beyond = [task for task in holder.applied if task.step >= step]
                assert not beyond or member.life > 1, "assigned beyond where the leader holds"
                assert holder.lives > 1 or set(holder.applied) >= tasks, "held before all was complete"
            if step == self.steps:
                member.over = True
            else:
                self.ask(member, hold_at=self.chance.randint(step + 1, self.steps))
        else:
            assert answer.kind == "done"
            member.over = True
