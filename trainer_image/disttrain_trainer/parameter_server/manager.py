"""What server 0 is beside a server: it knows who lives, and lends tasks (tasks.py). Workers ask; an answer may come
later than other messages.

    hello, start, next, leave, alive    worker -> manager
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.settings import ServerConfig
from disttrain_trainer.parameter_server.tasks import LEADER, Lease, StepResult, Task, Tasks, Verdict
from disttrain_trainer.parameter_server.wire import Answers, Malformed, Message, Sender, two_numbers, worker_of

DEFAULT_STALENESS = 4


class Manager:
    """The manager of a job's attempt as a function of messages."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._samples: int | None = None
        self._lives: dict[int, str] = {}
        self._waiting: dict[int, Sender] = {}
        settings = config.settings
        staleness = DEFAULT_STALENESS if settings.staleness is None else settings.staleness
        self._tasks = Tasks(config.workers, config.training.steps, settings.synchronization, staleness, config.silence)
        self.handlers: Mapping[str, Callable[[Sender, Message, float], Answers]] = {
            "hello": self._hello, "start": self._start, "next": self._next, "leave": self._leave, "alive": self._alive,
        }  # fmt: skip

    @property
    def live_workers(self) -> int:
        return len(self._tasks.live_clocks)

    def tick(self, now: float) -> None:
        """Time has passed."""
        for worker in self._tasks.expire(now):
            self._waiting.pop(worker, None)

    def stop(self) -> None:
        """End soon: SIGTERM."""
        self._tasks.stop()

    def answers(self) -> Answers:
        """What can be said now to workers that have asked for tasks."""
        found: Answers = []
        for worker, answer in self._tasks.answers():
            sender = self._waiting.pop(worker, None)
            if sender is not None:
                results = self._results() if worker == LEADER else []
                found.append((sender, _answer_of(answer, results, self._tasks.stopping)))
        return found

    def _hello(self, sender: Sender, message: Message, now: float) -> Answers:
        worker, samples = worker_of(message, self._config.workers), message.number("samples")
        if self._samples not in (None, samples):
            reason = f"worker {worker} finds {samples} training samples, others find {self._samples}"
            return [(sender, Message("unlike", {"reason": reason}))]
        self._samples = samples
        self._lives[worker] = str(message.fields.get("life"))
        self._waiting.pop(worker, None)
        self._tasks.join(worker, now)
        at = self._tasks.cursor
        fields = {"started": self._tasks.started, "step": self._tasks.floor, "epoch": at.epoch, "position": at.position}
        return [(sender, Message("welcome", fields))]

    def _start(self, sender: Sender, message: Message, now: float) -> Answers:
        cursor = Cursor(message.number("epoch"), message.number("position"))
        if self._samples is None or worker_of(message, self._config.workers) != LEADER:
            raise Malformed("only the leader starts, and after its hello")
        sampler = Sampler(self._samples, self._config.training.seed, self._config.batch, self._config.workers)
        self._tasks.start(sampler, message.number("step"), cursor, message.number("hold_at"), now)
        return [(sender, Message("started"))]

    def _next(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = worker_of(message, self._config.workers)
        if "done" in message.fields:
            task = Task(*two_numbers(message.numbers("done")))
            self._tasks.complete(worker, task, tuple(message.real(name) for name in ("loss", "weight", "samples")))
        if "hold_at" in message.fields:
            self._tasks.release(message.number("hold_at"))
        if message.fields.get("stopping") is True:
            self._tasks.stop()
        self._waiting[worker] = sender
        self._tasks.ask(worker, now)
        return []

    def _leave(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = worker_of(message, self._config.workers)
        self._waiting.pop(worker, None)
        self._tasks.leave(worker)
        return []

    def _alive(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = worker_of(message, self._config.workers)
        # A heartbeat of a former life of this worker says nothing about the present one.
        if self._lives.get(worker) == message.fields.get("life"):
            self._tasks.saw(worker, now)
        if message.fields.get("stopping") is True:
            self._tasks.stop()
        return [(sender, Message("alive"))]

    def _results(self) -> list[list[float]]:
        told, self._tasks.results = self._tasks.results, []
        return [_result_fields(one) for one in told]


def _answer_of(answer: Lease | Verdict, results: list[list[float]], stopping: bool) -> Message:
    common: dict[str, Any] = {"results": results, "stopping": stopping}
    if isinstance(answer, Verdict):
        return Message(answer.value, common)
    return Message(
        "task",
        {
            **common,
            "task": list(answer.task),
            "epoch": answer.cursor.epoch,
            "position": answer.cursor.position,
            "floor": answer.floor,
            "complete": answer.complete,
            "ahead": answer.ahead,
        },
    )


def _result_fields(result: StepResult) -> list[float]:
    return [result.step, result.loss, result.weight, result.samples]
