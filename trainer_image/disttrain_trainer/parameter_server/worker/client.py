"""The servers as a worker sees them: requests, each answered before the next one. Times out never by itself: while the
heartbeat hears the servers, an answer comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import zmq
from torch import Tensor, nn
from zmq.utils.monitor import recv_monitor_message

from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.placement import Segment, place
from disttrain_trainer.parameter_server.protocol.progress import TaskProgress, progress_of
from disttrain_trainer.parameter_server.protocol.sockets import connect, new_context, reconnect
from disttrain_trainer.parameter_server.protocol.tasks import LEADER, CompleteStep, Result, Task, Verdict
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message, decode, encode, key_with
from disttrain_trainer.parameter_server.worker.heartbeat import Heartbeat
from disttrain_trainer.parameter_server.worker.payload import Payload, numbers
from disttrain_trainer.parameter_server.worker.pulling import Pulled, Pulling
from disttrain_trainer.parameter_server.worker.pushing import Pushing
from disttrain_trainer.parameter_server.worker.worker_progress import WorkerProgress
from disttrain_trainer.runtime.errors import DataUnlike, PeerLost

_LOOK_MILLISECONDS = 200
_GREET_MILLISECONDS = 2000
_LINGER_MILLISECONDS = 2000


@dataclass(frozen=True)
class Welcome:
    """The manager's answer to a worker that begins. step, cursor: position of the job, if it has started."""

    started: bool
    step: int
    cursor: Cursor
    skipped: int
    """Tasks until then of which no update was made."""


@dataclass(frozen=True)
class Answer:
    """The manager's answer to a worker that asks for work: a task, or the reason why there is none."""

    task: Task | None
    verdict: Verdict | None
    cursor: Cursor
    floor: int
    """Steps below it are complete."""
    floor_cursor: Cursor
    """Where the data stands after those."""
    skipped: int
    """Tasks of those of which no update was made."""
    complete: int
    ahead: int
    results: list[CompleteStep]
    stopping: bool


class Servers:
    """All servers of the job, and the named parameters whose numbers they hold."""

    def __init__(
        self, addresses: Sequence[str], key: bytes, worker: int, parameters: Mapping[str, nn.Parameter],
        stopping: Callable[[], bool], patience: float, replaceable: bool = False,
        widths: Mapping[str, int] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """`addresses`: host:port. `key`: of the job's attempt. `stopping`: whether this worker was told to stop.
        `patience`: seconds for the first answer. `replaceable`: servers may be started anew and go on from a snapshot.
        `widths`: numbers of a row of each parameter that is a table."""
        self._keys = [key_with(server, key) for server in range(len(addresses))]
        self._worker, self._instance = worker, secrets.token_hex(8)
        self._stopping = stopping
        self._parameters = dict(parameters)
        sizes = {name: parameter.numel() for name, parameter in parameters.items()}
        self._widths = widths
        self.placement = place(sizes, len(addresses), widths)
        self._context = new_context(len(addresses))
        self._sockets = [connect(self._context, *one) for one in zip(addresses, self._keys, strict=True)]
        self._losses = [socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) for socket in self._sockets]
        """One for each server: it says when the connection was lost, and with it what was on its way."""
        self._addresses = addresses
        self._progress = WorkerProgress(worker, self._instance)
        self._heartbeat = Heartbeat(
            self._context,
            addresses,
            self._keys,
            worker,
            self._instance,
            self._progress,
            stopping,
            patience,
            replaceable,
        )
        self._asked: list[tuple[bytes, Message]] = [(b"", Message(""))] * len(addresses)
        self._pulling: Pulling | None = None
        self._requests = 0
        self._restarts = [0] * len(addresses)
        """Restarts of each server that were known when it was asked last."""
        self._reconnects = [0] * len(addresses)
        self.lost = [0] * len(addresses)
        """Completed tasks that each server has lost by being started anew, as far as this worker has seen."""
        self.pulled_bytes = 0
        """Bytes of the parameters that this worker has pulled."""

    def hello(self, samples: int) -> Welcome:
        """Begin. Raises DataUnlike where others have found another number of samples."""
        self._greet()
        self._progress.samples = samples
        answer = self._ask(0, Message("hello", {"samples": samples}))
        started, skipped = answer.fields["started"] is True, answer.number("skipped")
        return Welcome(started, answer.number("step"), _cursor(answer), skipped)

    def load(self, states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Give the servers the parameters and the optimizer's state of each, by name of the parameter."""
        messages = []
        for segments in self.placement:
            parts = [_parts_of_state(states.get(one.name, {}), one) for one in segments]
            values = [numbers(self._parameters[one.name].detach(), one) for one in segments]
            tensors = [*values, *(tensor for part in parts for tensor in part.values())]
            widths = [self._widths.get(one.name, 0) for one in segments]
            messages.append(Message("load", {"states": [list(part) for part in parts], "widths": widths}, tensors))
        self._ask_all(messages)

    def start(self, step: int, cursor: Cursor, hold_at: int, skipped: int = 0) -> None:
        """Let the work begin; the leader alone says so. skipped: tasks until then of which no update was made."""
        at = {"epoch": cursor.epoch, "position": cursor.position}
        self._ask(0, Message("start", {"step": step, **at, "hold_at": hold_at, "skipped": skipped}))
        self._progress.started(TaskProgress(step, step, cursor, hold_at, step, skipped=skipped))

    def next(self, done: tuple[Task, Result] | None = None, hold_at: int | None = None) -> Answer:
        """The next task. `done`: the one that is complete.

        `hold_at`: the leader's next step before which nothing is to be assigned.
        """
        fields: dict[str, Any] = {"stopping": self._stopping()}
        if done is not None:
            fields |= {"done": list(done[0]), **done[1]._asdict(), "clock": self._progress.completed(*done)}
        if hold_at is not None:
            fields["hold_at"] = hold_at
        if self._worker == LEADER:
            fields["acknowledged"] = self._progress.acknowledge(hold_at)
        answer = self._ask(0, Message("next", fields))
        self._progress.answered(answer)
        return _answer(answer)

    def begin_pull(self, complete: int = 0, *, whole: bool = False) -> Pulling:
        """Overwrite the parameters, as they come in, with those of the servers, which must have taken in the `complete`
        tasks.

        Bounded staleness rests on that. Rows of tables are overwritten with `whole` alone. Whatever the servers are
        asked next waits for all of it. Raises PeerLost where tasks are missing, but for a server that was started anew:
        what it has lost is counted.
        """
        order = {name: place for place, name in enumerate(self._parameters)}
        asked = []
        for server, segments in enumerate(self.placement):
            ranges = [index for index, one in enumerate(segments) if whole or one.name not in self._widths]
            asked.append(sorted(ranges, key=lambda index: order[segments[index].name]))
            self._send(server, Message("pull", {"ranges": asked[-1]}))
        self._pulling = pulling = Pulling(self.placement, self._parameters, asked, self._bucket)
        for server, count in enumerate(pulling.pulled.taken):
            missing = complete - count
            if missing > self.lost[server] and self._heartbeat.incarnations[server] <= 1:
                raise PeerLost(f"parameter server {server} has taken in {count} of {complete} completed tasks")
            self.lost[server] = max(self.lost[server], missing)
        return pulling

    def pull(self, complete: int = 0, *, whole: bool = False) -> Pulled:
        """Same as `begin_pull`, but return when all parameters have arrived."""
        pulling = self.begin_pull(complete, whole=whole)
        pulling.rest()
        return pulling.pulled

    def pull_rows(self, name: str, places: Tensor) -> None:
        """Overwrite some rows of a table with those of the servers. `places`: [n] int64 on the CPU, ascending."""
        width, table = self._widths[name], self._parameters[name].detach()
        asked = []
        for server, segments in enumerate(self.placement):
            for index, segment in enumerate(segments):
                first = segment.start // width
                own = places[(places >= first) & (places < segment.stop // width)]
                if segment.name == name and len(own):
                    self._send(server, Message("rows", {"range": index}, [own - first]))
                    asked.append((server, own))
        for server, own in asked:
            values = self._receive(server).tensors[0].view(-1, width)
            table[own.to(table.device)] = values.to(table.device)
            self.pulled_bytes += values.nbytes

    def begin_push(self, task: Task, weight: float, pulled: Pulled, floor: int, payload: Payload) -> Pushing:
        """Allow sending the part of the payload that is ready; `end_push` sends the rest."""
        common = {"task": list(task), "weight": weight, "floor": floor}
        fields = [{**common, "taken": taken} for taken in pulled.taken]
        return Pushing(self.placement, payload, fields, self._tell)

    def end_push(self, pushing: Pushing, payload: Payload) -> int:
        """Back when all servers have taken the push in. Returns the bytes of its tensors."""
        answers = self._ask_all(pushing.rest())
        for server, answer in enumerate(answers):
            if answer.kind == "again":
                answers[server] = self._ask(server, pushing.whole(server))
        payload.settle([answer.fields["fresh"] is True for answer in answers])
        return pushing.bytes

    def push(self, task: Task, weight: float, pulled: Pulled, floor: int, payload: Payload) -> int:
        """Give the servers what there is to push; back when all have taken it in. Returns the bytes of the tensors."""
        return self.end_push(self.begin_push(task, weight, pulled, floor, payload), payload)

    def fetch(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's state by parameter: tensors in its shape, and single numbers."""
        found: dict[str, dict[str, Tensor]] = {}
        for segments, answer in zip(
            self.placement, self._ask_all([Message("fetch")] * len(self._sockets)), strict=True
        ):
            rest = iter(answer.tensors)
            for segment, names in zip(segments, answer.fields["states"], strict=False):
                for name in names:
                    _put(found.setdefault(segment.name, {}), name, segment, next(rest), self._parameters[segment.name])
        return found

    def figures(self) -> list[Message]:
        """Return the counts of each server."""
        return self._ask_all([Message("figures")] * len(self._sockets))

    def finish(self) -> None:
        """Tell the servers that the job's work is done, or stopped and kept."""
        self._ask_all([Message("finish")] * len(self._sockets))

    def close(self) -> None:
        """Leave: this worker's task is assigned to another one at once."""
        self._heartbeat.end()
        self._pulling = None
        self._send(0, Message("leave"))
        for socket, losses in zip(self._sockets, self._losses, strict=True):
            socket.disable_monitor()
            losses.close(linger=0)
            socket.close(linger=_LINGER_MILLISECONDS)
        self._context.term()

    def _greet(self) -> None:
        """Hear from every server once, asking until it answers: from then on it is known when one is started anew."""
        message = Message("alive")
        for server, socket in enumerate(self._sockets):
            self._send(server, message)
            while not socket.poll(_GREET_MILLISECONDS):
                if self._heartbeat.failure is not None:
                    raise PeerLost(self._heartbeat.failure)
                self._transmit(server)
            self._receive(server)

    def _bucket(self, server: int) -> Message:
        message = self._receive(server)
        self.pulled_bytes += sum(values.nbytes for values in message.tensors)
        return message

    def _ask(self, server: int, message: Message) -> Message:
        self._send(server, message)
        return self._receive(server)

    def _ask_all(self, messages: Sequence[Message]) -> list[Message]:
        for server, message in enumerate(messages):
            self._send(server, message)
        return [self._receive(server) for server in range(len(messages))]

    def _send(self, server: int, message: Message) -> None:
        if self._pulling is not None:
            self._pulling.rest()
        self._requests += 1
        self._asked[server] = (b"%d" % self._requests, message)
        self._transmit(server)

    def _tell(self, server: int, message: Message) -> None:
        """Send what is not answered."""
        self._sockets[server].send_multipart([b"", *encode(self._signed(message), self._keys[server])], copy=False)

    def _transmit(self, server: int) -> None:
        number, message = self._asked[server]
        self._was_lost(server)  # what is lost from here on counts
        self._restarts[server] = self._heartbeat.restarts[server]
        # Without a copy of the tensors: nobody changes a gradient or a state after it has been handed over.
        self._sockets[server].send_multipart([number, *encode(self._signed(message), self._keys[server])], copy=False)

    def _signed(self, message: Message) -> Message:
        """With the sender, and the incarnations of the servers that this worker knows."""
        signature = {"worker": self._worker, "instance": self._instance, "incarnations": self._heartbeat.incarnations}
        return Message(message.kind, {**message.fields, **signature}, message.tensors)

    def _receive(self, server: int) -> Message:
        try:
            answer = decode([frame.buffer for frame in self._frames(server)[1:]], self._keys[server])
            while not self._heartbeat.accept(server, answer):
                # From an incarnation that has been replaced; the next one will be asked.
                answer = decode([frame.buffer for frame in self._frames(server)[1:]], self._keys[server])
        except Malformed as error:
            raise PeerLost(f"parameter server {server} does not speak as one of this job: {error}") from error
        if self._heartbeat.failure is not None:
            raise PeerLost(self._heartbeat.failure)
        if answer.kind == "empty":
            raise PeerLost(f"parameter server {server} holds no parameters: it was started anew")
        if answer.kind == "unlike":
            raise DataUnlike(f"{answer.fields['reason']}: the data must be alike in every pod")
        if answer.kind == "refused":
            raise RuntimeError(f"parameter server {server} refuses a message of this worker: {answer.fields['reason']}")
        return answer

    def _frames(self, server: int) -> list[zmq.Frame]:
        """Return the frames of the answer to the last request to the server. The request is sent once more if the
        server was restarted, or the connection was lost and made again."""
        socket = self._sockets[server]
        while True:
            while not socket.poll(_LOOK_MILLISECONDS):
                if self._heartbeat.failure is not None:
                    raise PeerLost(self._heartbeat.failure)
                if self._heartbeat.reconnects[server] > self._reconnects[server]:
                    self._reconnects[server] = self._heartbeat.reconnects[server]
                    reconnect(socket, self._addresses[server])
                    self._transmit(server)
                elif self._was_lost(server) or self._heartbeat.restarts[server] > self._restarts[server]:
                    self._transmit(server)
            frames = socket.recv_multipart(copy=False)
            # Asked twice, it may answer twice.
            if frames[0].bytes == self._asked[server][0]:
                return frames

    def _was_lost(self, server: int) -> bool:
        """Whether the connection has been lost since this was asked last."""
        lost = False
        while self._losses[server].poll(0):
            recv_monitor_message(self._losses[server])
            lost = True
        return lost


def _parts_of_state(state: Mapping[str, Tensor], segment: Segment) -> dict[str, Tensor]:
    """The segment's part of an optimizer's state. Numbers for the whole parameter go with every segment."""
    return {
        name: (value.reshape(-1) if value.dim() == 0 else value.reshape(-1)[segment.start : segment.stop]).cpu()
        for name, value in state.items()
    }


def _put(state: dict[str, Tensor], name: str, segment: Segment, values: Tensor, parameter: nn.Parameter) -> None:
    """The opposite of `_parts_of_state`, for one entry."""
    if name == "step":
        state[name] = values[0].clone()
        return
    whole = state.setdefault(name, torch.zeros(parameter.shape, dtype=values.dtype))
    whole.view(-1)[segment.start : segment.stop] = values


def _answer(message: Message) -> Answer:
    task = Task(*message.numbers("task")) if message.kind == "task" else None
    known = progress_of(message.fields.get("known"))
    return Answer(
        task=task,
        verdict=None if task is not None else Verdict(message.kind),
        cursor=_cursor(message) if task is not None else Cursor(),
        floor=known.floor,
        floor_cursor=known.cursor,
        skipped=known.skipped,
        complete=message.number("complete") if task is not None else 0,
        ahead=message.number("ahead") if task is not None else 0,
        results=[CompleteStep(int(step), *rest) for step, *rest in message.fields["results"]],
        stopping=message.fields["stopping"] is True,
    )


def _cursor(message: Message) -> Cursor:
    return Cursor(message.number("epoch"), message.number("position"))
