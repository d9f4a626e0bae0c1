"""A server as a function of messages: (who, message, now) -> answers. The loop around it is serve.py.

Server 0 is also the manager (manager.py). Workers ask; servers never speak first.

    load, pull, rows, part, push, fetch, alive, figures, finish    worker -> every server
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from disttrain_api.parallelism import Pushed, Synchronization
from disttrain_trainer.parameter_server.protocol.buckets import buckets
from disttrain_trainer.parameter_server.protocol.codec import ascending
from disttrain_trainer.parameter_server.protocol.counters import CountersByWorker
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import Answers, Malformed, Message, Sender, two_numbers, worker_of
from disttrain_trainer.parameter_server.server.aggregation import Aggregator, Push, rate_of
from disttrain_trainer.parameter_server.server.averaging import AveragingShard
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.manager import Manager
from disttrain_trainer.parameter_server.server.push_decoder import PushDecoder
from disttrain_trainer.parameter_server.server.reassembly import Reassembly
from disttrain_trainer.parameter_server.server.shard import Shard

DEFAULT_SNAPSHOT_INTERVAL = 100
_ONCE = {"load": "loaded", "push": "pushed"}
"""What is done once however often it is asked for, and the answer when it is done."""
_NO_WORKERS_SECONDS = 10.0
"""A worker that lives says so each second."""


class Server:
    """One server of a job, or of its attempt."""

    def __init__(self, config: ServerConfig, log: Callable[[str], None] = lambda sentence: None) -> None:
        """`log`: writes a sentence to the log."""
        self._config, self.index, self.workers = config, config.index, config.workers
        self._instance = secrets.token_hex(8)
        self._restored = False
        self._incarnations = {config.index: config.incarnation}
        self.finished = False
        self.superseded = False
        """Whether a newer incarnation of this server is at work: peers ignore this one."""
        self._shard: Shard | None = None
        self._aggregator: Aggregator | None = None
        self._manager = Manager(config, log) if config.index == 0 else None
        self._reassembly = Reassembly()
        self._done: dict[tuple[int, str], tuple[tuple[object, bytes], Message]] = {}
        """The instance and number of the last question of each worker and kind in _ONCE, and the answer: asked twice,
        it is given twice."""
        self._decoder = PushDecoder(config.index, config.compression, config.training.seed)
        self._counters = CountersByWorker()
        self._next_snapshot = 0
        self._last_message_at: float | None = None
        self._handlers: Mapping[str, Callable[[Sender, Message, float], Answers]] = {
            "load": self._load, "pull": self._pull, "rows": self._rows, "part": self._part, "push": self._push,
            "fetch": self._fetch, "alive": self._alive, "figures": self._figures, "finish": self._finish,
            **({} if self._manager is None else self._manager.handlers),
        }  # fmt: skip

    def receive(self, sender: Sender, message: Message, now: float) -> Answers:
        """Return the messages to send after this one. Raises Malformed, and then nothing has changed."""
        self._last_message_at = now
        self._learn_incarnations(message)
        if self.superseded:
            return []
        handler, worker = self._handlers.get(message.kind), worker_of(message, self._config.workers)
        if handler is None:
            raise Malformed(f"unknown message {message.kind!r:.40}")
        asked, done = (message.fields.get("instance"), sender[1]), self._done.get((worker, message.kind))
        if done is not None and done[0] == asked:
            return [(sender, done[1])]
        answers = handler(sender, message, now)
        for _, answer in answers if message.kind in _ONCE else ():
            if answer.kind == _ONCE[message.kind]:
                self._done[worker, message.kind] = asked, answer
        self._counters.count(worker, message, [answer for receiver, answer in answers if receiver == sender])
        return [*answers, *self._later(now)]

    def tick(self, now: float) -> Answers:
        """Return the messages to send because time has passed."""
        self._last_message_at = now if self._last_message_at is None else self._last_message_at
        if self._manager is None or self.superseded:
            return []
        return [*self._manager.tick(now), *self._later(now)]

    def stop(self, now: float) -> Answers:
        """End soon: SIGTERM."""
        if self._manager is not None:
            self._manager.stop()
        return self._later(now)

    def has_no_workers(self, now: float) -> bool:
        """Return whether no worker has sent anything for so long that none can be left to need this server."""
        return self._last_message_at is not None and now - self._last_message_at > _NO_WORKERS_SECONDS

    def identity(self) -> dict[str, Any]:
        """Return the fields about the server that every answer has.

        instance: random, so a restarted server is told from the one that is known; incarnation: counts its starts in
        this attempt; restored: whether it holds what its former incarnation held; incarnations: the newest known of
        each server.
        """
        incarnations = [self._incarnations.get(index, 0) for index in range(max(self._incarnations) + 1)]
        return {
            "instance": self._instance,
            "incarnation": self._config.incarnation,
            "restored": self._restored,
            "incarnations": incarnations,
        }

    def snapshot(self) -> Message | None:
        """Return the state of this server when a new snapshot is due."""
        shard, aggregator = self._shard, self._aggregator
        if not self._config.snapshots or shard is None or aggregator is None:
            return None
        interval = self._config.settings.snapshot_interval or DEFAULT_SNAPSHOT_INTERVAL
        if aggregator.taken < self._next_snapshot:
            return None
        self._next_snapshot = aggregator.taken + interval
        taken, floor, seen = aggregator.remembered()
        message = _held(shard)
        fields = {**message.fields, "version": shard.version, "taken": taken, "floor": floor, "seen": seen}
        if self._manager is not None:
            fields["table"] = self._manager.table()
        return Message("snapshot", fields, message.tensors)

    def restore(self, snapshot: Message) -> None:
        """Go on from what a former incarnation of this server held."""
        self._take_over(snapshot)
        assert self._shard is not None
        assert self._aggregator is not None
        self._shard.version = snapshot.number("version")
        self._next_snapshot = taken = snapshot.number("taken")
        self._aggregator.remember(taken, snapshot.number("floor"), snapshot.numbers("seen"))
        self._restored = True
        if self._manager is not None:
            self._manager.recover(snapshot.fields.get("table"))

    def _finish(self, sender: Sender, message: Message, now: float) -> Answers:
        self.finished = True
        return [(sender, Message("finished"))]

    def _alive(self, sender: Sender, message: Message, now: float) -> Answers:
        return [(sender, Message("alive"))]

    def _load(self, sender: Sender, message: Message, now: float) -> Answers:
        self._take_over(message)
        return [(sender, Message("loaded"))]

    def _take_over(self, message: Message) -> None:
        """Hold the message's numbers and optimizer states."""
        values, states, widths = _held_by(message)
        training, settings = self._config.training, self._config.settings
        kind = AveragingShard if settings.push is Pushed.PARAMETERS else Shard
        self._shard = kind(values, training.optimizer, states, widths)
        self._aggregator = Aggregator(
            self._shard,
            self._config.workers,
            rate_of(training, settings, self._config.workers),
            together=settings.synchronization is Synchronization.SYNC,
            staleness_aware=bool(settings.staleness_aware_rate),
        )

    def _pull(self, sender: Sender, message: Message, now: float) -> Answers:
        if self._shard is None or self._aggregator is None:
            return [(sender, Message("empty"))]
        fields = {"version": self._shard.version, "taken": self._aggregator.taken}
        squares = {str(step): square for step, square in self._aggregator.squares.items()}
        ranges, lengths = message.numbers("ranges"), self._shard.lengths
        if len({*ranges}) < len(ranges) or any(index >= len(lengths) for index in ranges):
            raise Malformed(f"`ranges` of pull are no ranges of the {len(lengths)} that there are")
        values = self._shard.values(ranges)
        return [
            (
                sender,
                Message(
                    "parameters",
                    {**fields, "squares": squares, "ranges": [ranges[place] for place in bucket]},
                    [values[place] for place in bucket],
                ),
            )
            for bucket in buckets([one.nbytes for one in values])
        ]

    def _rows(self, sender: Sender, message: Message, now: float) -> Answers:
        if self._shard is None:
            return [(sender, Message("empty"))]
        index, widths = message.number("range"), self._shard.widths
        if index >= len(widths) or not widths[index] or [tensor.dtype for tensor in message.tensors] != [torch.int64]:
            raise Malformed(f"range {index} has no rows, or what is asked for are none")
        places = ascending(message.tensors[0], self._shard.lengths[index] // widths[index])
        return [(sender, Message("rows", {}, [self._shard.rows(index, places)]))]

    def _part(self, sender: Sender, message: Message, now: float) -> Answers:
        self._reassembly.add(sender[0], Task(*two_numbers(message.numbers("task"))), message)
        return []

    def _push(self, sender: Sender, message: Message, now: float) -> Answers:
        if self._shard is None or self._aggregator is None:
            return [(sender, Message("empty"))]
        task = Task(*two_numbers(message.numbers("task")))
        whole = self._reassembly.join(sender[0], task, message)
        if whole is None:
            return [(sender, Message("again"))]
        updates = self._decoder.decode(whole, task, self._shard)
        weight, taken, floor = message.real("weight"), message.number("taken"), message.number("floor")
        staleness = self._aggregator.staleness_of(taken)
        fresh = self._aggregator.take(Push(task, weight, updates, taken, floor))
        return [(sender, Message("pushed", {"fresh": fresh, "staleness": staleness}))]

    def _fetch(self, sender: Sender, message: Message, now: float) -> Answers:
        states = [] if self._shard is None else self._shard.optimizer_states()
        tensors = [tensor for state in states for tensor in state.values()]
        return [(sender, Message("optimizer", {"states": [list(state) for state in states]}, tensors))]

    def _figures(self, sender: Sender, message: Message, now: float) -> Answers:
        aggregator = self._aggregator
        staleness = {} if aggregator is None else {str(key): count for key, count in aggregator.staleness.items()}
        fields = {
            "version": 0 if self._shard is None else self._shard.version,
            "late": 0 if aggregator is None else aggregator.late,
            "counters": self._counters.fields(),
            "staleness": staleness,
            **({} if self._manager is None else self._manager.figures()),
            "dropped": message.fields.get("dropped", 0),
        }
        return [(sender, Message("figures", fields))]

    def _later(self, now: float) -> Answers:
        """Answers to what was asked before."""
        return [] if self._manager is None else self._manager.answers(now)

    def _learn_incarnations(self, message: Message) -> None:
        known = message.numbers("incarnations") if "incarnations" in message.fields else ()
        for index, incarnation in enumerate(known):
            self._incarnations[index] = max(incarnation, self._incarnations.get(index, 0))
        self.superseded = self._incarnations[self._config.index] > self._config.incarnation


def _held(shard: Shard) -> Message:
    """The message that loads what the shard holds."""
    states = shard.optimizer_states()
    tensors = [*shard.values(), *(tensor for state in states for tensor in state.values())]
    return Message("load", {"states": [list(state) for state in states], "widths": shard.widths}, tensors)


def _held_by(message: Message) -> tuple[Sequence[Tensor], list[dict[str, Tensor]], Sequence[int]]:
    """The opposite of `_held`: values, optimizer states and widths of rows, of each range. Raises Malformed."""
    names = message.fields.get("states")
    if not isinstance(names, list) or not all(isinstance(entry, list) for entry in names):
        raise Malformed("`states` of load is no list of lists")
    count = len(names)
    if len(message.tensors) != count + sum(len(entry) for entry in names):
        raise Malformed(f"{len(message.tensors)} tensors for {count} ranges and their states")
    widths = message.numbers("widths") if "widths" in message.fields else [0] * count
    values, rest = message.tensors[:count], iter(message.tensors[count:])
    if len(widths) != count or any(width and len(value) % width for width, value in zip(widths, values, strict=True)):
        raise Malformed("`widths` of load are not those of the ranges' rows")
    return values, [{str(name): next(rest) for name in entry} for entry in names], widths
