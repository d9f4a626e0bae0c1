"""A server as a function of messages: (who, message, now) -> answers. The loop around it is serve.py.

Server 0 is also the manager: it knows who lives, and lends tasks (tasks.py). Workers ask; servers never speak first,
but an answer may come later than other messages.

    hello, start, next, leave, finish    worker -> server 0
    load, pull, rows, part, push, fetch, alive, figures, finish    worker -> every server
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from disttrain_api.batch import Batch
from disttrain_api.parallelism import Compression, ParameterServer, Pushed, Synchronization
from disttrain_api.training import Training
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.averaging import Averages
from disttrain_trainer.parameter_server.codes import ascending
from disttrain_trainer.parameter_server.gradients import Gradients, Push, rate_of
from disttrain_trainer.parameter_server.parts import Parts
from disttrain_trainer.parameter_server.pushed import Reader
from disttrain_trainer.parameter_server.shard import Shard
from disttrain_trainer.parameter_server.tasks import LEADER, Lease, StepResult, Task, Tasks, Verdict
from disttrain_trainer.parameter_server.wire import Malformed, Message

DEFAULT_STALENESS = 4
DEFAULT_SNAPSHOT_INTERVAL = 100
SILENCE_SECONDS = 10.0
"""A worker that says nothing for so long counts as dead. It speaks every second, also while it computes."""

Sender = tuple[bytes, bytes]
"""Who asks, and the number of the request, both as the transport has them."""
Answers = list[tuple[Sender, Message]]


@dataclass(frozen=True)
class ServerConfig:
    """What a server knows from the job. index: of this server; workers: of the job."""

    index: int
    workers: int
    training: Training
    batch: Batch
    settings: ParameterServer
    silence: float = SILENCE_SECONDS
    snapshots: bool = False
    """Whether this server can go on from a snapshot.

    Not where steps are updated as a whole, which all servers must have made alike, and not as the manager, who alone
    knows the tasks.
    """
    compression: Compression | None = None


class Server:
    """One server of a job, or of its attempt."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self.life = secrets.token_hex(8)
        """Tells workers a server that was started anew, and so has lost what it held, from the one that they know."""
        self.finished = False
        self._shard: Shard | None = None
        self._gradients: Gradients | None = None
        self._samples: int | None = None
        self._lives: dict[int, str] = {}
        self._waiting: dict[int, Sender] = {}
        settings = config.settings
        staleness = DEFAULT_STALENESS if settings.staleness is None else settings.staleness
        self._tasks = Tasks(config.workers, config.training.steps, settings.synchronization, staleness, config.silence)
        self._reader = Reader(config.index, config.compression, config.training.seed)
        self._parts = Parts()
        self.pulls = 0
        self._next_snapshot = 0
        self._handlers: Mapping[str, Callable[[Sender, Message, float], Answers]] = {
            "hello": self._hello, "start": self._start, "next": self._next, "leave": self._leave,
            "load": self._load, "pull": self._pull, "rows": self._rows, "part": self._part, "push": self._push,
            "fetch": self._fetch, "alive": self._alive, "figures": self._figures, "finish": self._finish,
        }  # fmt: skip

    def receive(self, sender: Sender, message: Message, now: float) -> Answers:
        """What to send, to whom, after this message. Raises Malformed, and then nothing has changed."""
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise Malformed(f"unknown message {message.kind!r:.40}")
        return [*handler(sender, message, now), *self._lend()]

    def tick(self, now: float) -> Answers:
        """What to send because time has passed."""
        for worker in self._tasks.expire(now):
            self._waiting.pop(worker, None)
        return self._lend()

    def stop(self) -> Answers:
        """End soon: SIGTERM."""
        self._tasks.stop()
        return self._lend()

    def snapshot(self) -> Message | None:
        """What this server holds, when it is time to write it down again."""
        shard, gradients = self._shard, self._gradients
        if not self._config.snapshots or shard is None or gradients is None:
            return None
        interval = self._config.settings.snapshot_interval or DEFAULT_SNAPSHOT_INTERVAL
        if shard.version < self._next_snapshot:
            return None
        self._next_snapshot = shard.version + interval
        taken, floor, seen = gradients.remembered()
        message = _held(shard)
        fields = {**message.fields, "version": shard.version, "taken": taken, "floor": floor, "seen": seen}
        return Message("snapshot", fields, message.tensors)

    def restore(self, snapshot: Message) -> None:
        """Go on from what a former life of this server held."""
        self._take_over(snapshot)
        assert self._shard is not None
        assert self._gradients is not None
        self._shard.version = self._next_snapshot = snapshot.number("version")
        self._gradients.remember(snapshot.number("taken"), snapshot.number("floor"), snapshot.numbers("seen"))

    def _hello(self, sender: Sender, message: Message, now: float) -> Answers:
        worker, samples = self._worker(message), message.number("samples")
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
        if self._samples is None or self._worker(message) != LEADER:
            raise Malformed("only the leader starts, and after its hello")
        sampler = Sampler(self._samples, self._config.training.seed, self._config.batch, self._config.workers)
        self._tasks.start(sampler, message.number("step"), cursor, message.number("hold_at"), now)
        return [(sender, Message("started"))]

    def _next(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = self._worker(message)
        if "done" in message.fields:
            task = Task(*_two(message.numbers("done")))
            self._tasks.complete(worker, task, tuple(message.real(name) for name in ("loss", "weight", "samples")))
        if "hold_at" in message.fields:
            self._tasks.release(message.number("hold_at"))
        if message.fields.get("stopping") is True:
            self._tasks.stop()
        self._waiting[worker] = sender
        self._tasks.ask(worker, now)
        return []

    def _leave(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = self._worker(message)
        self._waiting.pop(worker, None)
        self._tasks.leave(worker)
        return []

    def _finish(self, sender: Sender, message: Message, now: float) -> Answers:
        self.finished = True
        return [(sender, Message("finished"))]

    def _alive(self, sender: Sender, message: Message, now: float) -> Answers:
        worker = self._worker(message)
        # A heartbeat of a former life of this worker says nothing about the present one.
        if self._lives.get(worker) == message.fields.get("life"):
            self._tasks.saw(worker, now)
        if message.fields.get("stopping") is True:
            self._tasks.stop()
        return [(sender, Message("alive"))]

    def _load(self, sender: Sender, message: Message, now: float) -> Answers:
        self._take_over(message)
        return [(sender, Message("loaded"))]

    def _take_over(self, message: Message) -> None:
        """Hold the message's numbers and optimizer states."""
        names = message.fields.get("states")
        if not isinstance(names, list) or not all(isinstance(entry, list) for entry in names):
            raise Malformed("`states` of load is no list of lists")
        count = len(names)
        if len(message.tensors) != count + sum(len(entry) for entry in names):
            raise Malformed(f"{len(message.tensors)} tensors for {count} ranges and their states")
        widths = message.numbers("widths") if "widths" in message.fields else [0] * count
        values = message.tensors[:count]
        if len(widths) != count or any(
            width and len(value) % width for width, value in zip(widths, values, strict=True)
        ):
            raise Malformed("`widths` of load are not those of the ranges' rows")
        rest = iter(message.tensors[count:])
        states = [{str(name): next(rest) for name in entry} for entry in names]
        training, settings = self._config.training, self._config.settings
        kind = Averages if settings.push is Pushed.PARAMETERS else Shard
        self._shard = kind(values, training.optimizer, states, widths)
        self._gradients = Gradients(
            self._shard,
            self._config.workers,
            rate_of(training, settings, self._config.workers),
            together=settings.synchronization is Synchronization.SYNC,
            staleness_aware=bool(settings.staleness_aware_rate),
        )

    def _pull(self, sender: Sender, message: Message, now: float) -> Answers:
        if self._shard is None or self._gradients is None:
            return [(sender, Message("empty"))]
        self.pulls += 1
        fields = {"version": self._shard.version, "taken": self._gradients.taken}
        squares = {str(step): square for step, square in self._gradients.squares.items()}
        # Rows are asked for one by one, but by who must have all that there is.
        whole = message.fields.get("whole") is True
        ranges = [index for index, width in enumerate(self._shard.widths) if whole or not width]
        return [(sender, Message("parameters", {**fields, "squares": squares}, self._shard.values(ranges)))]

    def _rows(self, sender: Sender, message: Message, now: float) -> Answers:
        if self._shard is None:
            return [(sender, Message("empty"))]
        index, widths = message.number("range"), self._shard.widths
        if index >= len(widths) or not widths[index] or [tensor.dtype for tensor in message.tensors] != [torch.int64]:
            raise Malformed(f"range {index} has no rows, or what is asked for are none")
        places = ascending(message.tensors[0], self._shard.lengths[index] // widths[index])
        return [(sender, Message("rows", {}, [self._shard.rows(index, places)]))]

    def _part(self, sender: Sender, message: Message, now: float) -> Answers:
        self._parts.add(sender[0], Task(*_two(message.numbers("task"))), message)
        return []

    def _push(self, sender: Sender, message: Message, now: float) -> Answers:
        if self._shard is None or self._gradients is None:
            return [(sender, Message("empty"))]
        task = Task(*_two(message.numbers("task")))
        whole = self._parts.join(sender[0], task, message)
        if whole is None:
            return [(sender, Message("again"))]
        contents = self._reader.read(whole, task, self._shard)
        weight, taken, floor = message.real("weight"), message.number("taken"), message.number("floor")
        fresh = self._gradients.take(Push(task, weight, contents, taken, floor))
        return [(sender, Message("pushed", {"fresh": fresh}))]

    def _fetch(self, sender: Sender, message: Message, now: float) -> Answers:
        states = [] if self._shard is None else self._shard.optimizer_states()
        tensors = [tensor for state in states for tensor in state.values()]
        return [(sender, Message("optimizer", {"states": [list(state) for state in states]}, tensors))]

    def _figures(self, sender: Sender, message: Message, now: float) -> Answers:
        gradients = self._gradients
        staleness = {} if gradients is None else {str(key): count for key, count in gradients.staleness.items()}
        fields = {
            "version": 0 if self._shard is None else self._shard.version,
            "taken": 0 if gradients is None else gradients.taken,
            "late": 0 if gradients is None else gradients.late,
            "pulls": self.pulls,
            "staleness": staleness,
            "live": len(self._tasks.live_clocks),
            "dropped": message.fields.get("dropped", 0),
        }
        return [(sender, Message("figures", fields))]

    def _lend(self) -> Answers:
        found: Answers = []
        for worker, answer in self._tasks.answers():
            sender = self._waiting.pop(worker, None)
            if sender is not None:
                results = self._results() if worker == LEADER else []
                found.append((sender, _answer_of(answer, results, self._tasks.stopping)))
        return found

    def _results(self) -> list[list[float]]:
        told, self._tasks.results = self._tasks.results, []
        return [_result_fields(one) for one in told]

    def _worker(self, message: Message) -> int:
        worker = message.number("worker")
        if worker >= self._config.workers:
            raise Malformed(f"worker {worker} of {self._config.workers}")
        return worker


def _held(shard: Shard) -> Message:
    """The message that loads what the shard holds."""
    states = shard.optimizer_states()
    tensors = [*shard.values(), *(tensor for state in states for tensor in state.values())]
    return Message("load", {"states": [list(state) for state in states], "widths": shard.widths}, tensors)


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


def _two(values: list[int]) -> tuple[int, int]:
    if len(values) != 2:
        raise Malformed(f"{len(values)} numbers, expected a step and a part")
    return values[0], values[1]
