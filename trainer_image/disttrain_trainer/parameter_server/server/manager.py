"""The manager, in server 0: it knows which workers are alive, and assigns tasks (scheduler.py).

Workers ask; an answer may arrive later than other messages.

    hello, start, next, leave, alive, report    worker -> manager

The table of tasks is in its memory alone. Should it die, its next incarnation asks the workers what they
remember, and assigns nothing before it has heard all that live (recovery.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.protocol.progress import TaskProgress, progress_of, result_of
from disttrain_trainer.parameter_server.protocol.tasks import LEADER, Task, Verdict
from disttrain_trainer.parameter_server.protocol.wire import Answers, Malformed, Message, Sender, two_numbers, worker_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.recovery import Recovery
from disttrain_trainer.parameter_server.server.scheduler import Assignment, TaskScheduler
from disttrain_trainer.parameter_server.server.stragglers import Straggler, Stragglers

DEFAULT_STALENESS = 4
_ABSENT_SECONDS = 2.0
"""Between two ticks, which come twice a second: the manager's own machine stood still, or it took a large push in. So
long it takes to hear who lives: a beat, and what has piled up."""

Handler = Callable[[Sender, Message, float], Answers]


class Manager:
    """The manager of a job's attempt as a function of messages."""

    def __init__(self, config: ServerConfig, log: Callable[[str], None] = lambda sentence: None) -> None:
        """`log`: writes a sentence to the log."""
        self._config, self._log = config, log
        self._samples: int | None = None
        self._instances: dict[int, str] = {}
        self._waiting: dict[int, Sender] = {}
        self._answered: dict[int, tuple[bytes, Message]] = {}
        """Number of the last question of each worker for work, and the answer: asked twice, it is given twice."""
        self._assigned_at: dict[int, float] = {}
        self._ticked: float | None = None
        self._recovery: Recovery | None = None
        self._deferred: dict[int, tuple[Handler, Sender, Message]] = {}
        """What is answered once the recovery is over."""
        self._unreported: set[int] = set()
        """Workers that have not yet reported to this incarnation what they remember."""
        self.stragglers = Stragglers()
        settings = config.settings
        staleness = DEFAULT_STALENESS if settings.staleness is None else settings.staleness
        self._scheduler = TaskScheduler(
            config.workers, config.training.steps, settings.synchronization, staleness, config.heartbeat_timeout
        )
        self.handlers: Mapping[str, Handler] = {
            "hello": self._or_later(self._hello), "start": self._or_later(self._start),
            "next": self._or_later(self._next), "leave": self._leave, "alive": self._alive, "report": self._report,
        }  # fmt: skip

    def figures(self) -> dict[str, float]:
        """Live workers; the slowest and how many times the others' median its tasks take."""
        found: dict[str, float] = {"live": len(self._scheduler.live_clocks)}
        slowest = self.stragglers.slowest()
        if slowest is not None:
            found |= {"slowest_worker": slowest.worker, "slowest_ratio": slowest.ratio}
        return found

    def table(self) -> dict[str, Any] | None:
        """Return what the next incarnation must know and workers do not remember; None before the work has begun."""
        if not self._scheduler.started or self._samples is None:
            return None
        return {**self._scheduler.known().fields(), "samples": self._samples}

    def recover(self, table: Mapping[str, Any] | None) -> None:
        """Be the next incarnation of a manager that was at work. `table`: of its last snapshot. Raises Malformed."""
        known = None if table is None else progress_of(table)
        self._samples = None if table is None else Message("table", table).number("samples")
        self._recovery = Recovery(self._config.workers, self._config.heartbeat_timeout, known)
        self._unreported = set(range(self._config.workers))

    def tick(self, now: float) -> Answers:
        """Time has passed."""
        absent = 0.0 if self._ticked is None else now - self._ticked
        self._ticked = now
        if absent > _ABSENT_SECONDS:
            self._scheduler.extend_timeouts(_ABSENT_SECONDS, now)
        for worker in self._scheduler.expire(now):
            self._log(
                f"worker {worker} has been silent for {self._config.heartbeat_timeout:g} s:"
                " its tasks are assigned to others"
            )
            # What it asks for is not forgotten: should it live, it waits for the answer and does not ask again.
            self._forget_answer(worker)
        if self._recovery is not None and self._recovery.over(now):
            return self._resume(self._recovery, now)
        return []

    def stop(self) -> None:
        """End soon: SIGTERM."""
        self._scheduler.stop()

    def answers(self, now: float) -> Answers:
        """Return the answers that are possible now to workers that have asked for tasks."""
        found: Answers = []
        for worker, answer in self._scheduler.answers() if self._recovery is None else ():
            sender = self._waiting.pop(worker, None)
            if sender is not None:
                message = self._answer_of(worker, answer)
                self._answered[worker] = (sender[1], message)
                self._assigned_at[worker] = now
                found.append((sender, message))
        return found

    def _or_later(self, handler: Handler) -> Handler:
        """Answer at once, or when the recovery is over."""

        def handle(sender: Sender, message: Message, now: float) -> Answers:
            worker = worker_of(message, self._config.workers)
            if self._recovery is None:
                return handler(sender, message, now)
            if message.kind == "hello":
                # A restarted worker remembers nothing.
                self._recovery.add_report(worker, None, None, now)
                self._unreported.discard(worker)
            self._deferred[worker] = (handler, sender, message)
            return []

        return handle

    def _resume(self, recovery: Recovery, now: float) -> Answers:
        """Go on with what is known now; answer what was asked meanwhile."""
        self._recovery = None
        if recovery.known is not None and self._samples is not None:
            self._scheduler.resume(self._sampler(), recovery.known, recovery.reported, now)
            for worker, task in sorted(recovery.assigned.items()):
                self._scheduler.assign_again(worker, task)
        self._log(f"resumes after step {self._scheduler.floor}, with reports of {len(recovery.reported)} workers")
        deferred, self._deferred = self._deferred, {}
        found: Answers = []
        for handler, sender, message in deferred.values():
            try:
                found += handler(sender, message, now)
            except Malformed as error:
                found.append((sender, Message("refused", {"reason": str(error)})))
        return found

    def _hello(self, sender: Sender, message: Message, now: float) -> Answers:
        worker, samples = worker_of(message, self._config.workers), message.number("samples")
        if self._samples not in (None, samples):
            reason = f"worker {worker} finds {samples} training samples, others find {self._samples}"
            return [(sender, Message("unlike", {"reason": reason}))]
        self._samples = samples
        self._instances[worker] = str(message.fields.get("instance"))
        self._unreported.discard(worker)
        self._forget(worker)
        self._scheduler.join(worker, now)
        at = self._scheduler.cursor
        fields = {
            "started": self._scheduler.started,
            "step": self._scheduler.floor,
            "epoch": at.epoch,
            "position": at.position,
            "skipped": self._scheduler.skipped,
        }
        return [(sender, Message("welcome", fields))]

    def _start(self, sender: Sender, message: Message, now: float) -> Answers:
        cursor = Cursor(message.number("epoch"), message.number("position"))
        if self._samples is None or worker_of(message, self._config.workers) != LEADER:
            raise Malformed("only the leader starts, and after its hello")
        step, hold_at, skipped = (message.number(name) for name in ("step", "hold_at", "skipped"))
        # It may say so twice: to a manager that died before it answered, too.
        if not self._scheduler.started:
            self._scheduler.start(self._sampler(), step, cursor, hold_at, now, skipped)
        return [(sender, Message("started"))]

    def _next(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = worker_of(message, self._config.workers)
        number, answer = self._answered.get(worker, (b"", None))
        if answer is not None and number == sender[1]:
            return [(sender, answer)]
        if "done" in message.fields:
            task = Task(*two_numbers(message.numbers("done")))
            self._scheduler.complete(worker, task, result_of(message), message.number("clock"))
            if worker in self._assigned_at:
                self.stragglers.took(worker, now - self._assigned_at.pop(worker))
                self._name_stragglers()
        if "acknowledged" in message.fields:
            self._scheduler.acknowledge(message.number("acknowledged"))
        if "hold_at" in message.fields:
            self._scheduler.release(message.number("hold_at"))
        if message.fields.get("stopping") is True:
            self._scheduler.stop(worker)
        self._waiting[worker] = sender
        self._scheduler.ask(worker, now)
        return []

    def _leave(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = worker_of(message, self._config.workers)
        self._forget(worker)
        self._deferred.pop(worker, None)
        if self._recovery is not None:
            self._recovery.add_report(worker, None, None, now)
        self._scheduler.leave(worker)
        return []

    def _alive(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = worker_of(message, self._config.workers)
        # A heartbeat of a former instance of this worker says nothing about the present one.
        if self._instances.get(worker) == message.fields.get("instance"):
            self._saw(worker, now)
        if message.fields.get("stopping") is True:
            self._scheduler.stop(worker)
        return [(sender, Message("alive", {"report": worker in self._unreported}))]

    def _report(self, sender: Sender, message: Message, now: float) -> Answers:
        """Process a worker's report of what it remembers, for a restarted manager."""
        worker, samples = worker_of(message, self._config.workers), message.number("samples")
        known = None if message.fields.get("known") is None else progress_of(message.fields["known"])
        assigned = None if message.fields.get("assigned") is None else Task(*two_numbers(message.numbers("assigned")))
        if worker not in self._unreported:
            return []
        self._unreported.discard(worker)
        self._samples = samples if self._samples is None else self._samples
        self._instances[worker] = str(message.fields.get("instance"))
        if self._recovery is not None:
            self._recovery.add_report(worker, known, assigned, now)
        elif self._scheduler.started:
            self._merge_late(worker, known, assigned, now)
        return []

    def _merge_late(self, worker: int, known: TaskProgress | None, assigned: Task | None, now: float) -> None:
        if known is not None:
            self._scheduler.merge(known)
        self._saw(worker, now)
        if assigned is not None:
            self._scheduler.assign_again(worker, assigned)

    def _saw(self, worker: int, now: float) -> None:
        """A sign of life, perhaps of one that was taken for dead while it waited."""
        if worker in self._waiting:
            self._scheduler.ask(worker, now)
        else:
            self._scheduler.saw(worker, now)

    def _sampler(self) -> Sampler:
        assert self._samples is not None
        return Sampler(self._samples, self._config.training.seed, self._config.batch, self._config.workers)

    def _forget(self, worker: int) -> None:
        """Forget the request of a worker that is gone or begins again."""
        self._waiting.pop(worker, None)
        self._forget_answer(worker)

    def _forget_answer(self, worker: int) -> None:
        """Forget the last task of the worker: it is assigned to others."""
        self._answered.pop(worker, None)
        self._assigned_at.pop(worker, None)
        self.stragglers.forget(worker)

    def _name_stragglers(self) -> None:
        begun, over = self.stragglers.judge()
        for one in begun:
            self._log(_named(one))
        for worker in over:
            self._log(f"worker {worker} is no straggler any more")

    def _answer_of(self, worker: int, answer: Assignment | Verdict) -> Message:
        known = self._scheduler.known_to(worker)
        results = [list(one) for one in self._scheduler.results] if worker == LEADER else []
        common: dict[str, Any] = {"results": results, "stopping": self._scheduler.stopping, "known": known.fields()}
        if isinstance(answer, Verdict):
            return Message(answer.value, common)
        return Message(
            "task",
            {
                **common,
                "task": list(answer.task),
                "epoch": answer.cursor.epoch,
                "position": answer.cursor.position,
                "complete": answer.complete,
                "ahead": answer.ahead,
            },
        )


def _named(one: Straggler) -> str:
    return (
        f"worker {one.worker} is a straggler: {one.seconds:.3g} s per task, {one.ratio:.1f} times the others' median of"
        f" {one.others:.3g} s"
    )
