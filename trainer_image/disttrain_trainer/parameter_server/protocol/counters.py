"""What a server has done for each worker, counted from the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from disttrain_trainer.parameter_server.protocol.wire import Message


@dataclass
class WorkerCounters:
    """Since the server began. staleness: sum over the pushes; bytes: of tensors, headers not included."""

    pushes: int = 0
    pulls: int = 0
    staleness: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0

    def __sub__(self, other: WorkerCounters) -> WorkerCounters:
        return WorkerCounters(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


class CountersByWorker:
    """The counters of each worker that this server has heard of."""

    def __init__(self) -> None:
        self._of: dict[int, WorkerCounters] = {}

    def count(self, worker: int, message: Message, answers: Sequence[Message]) -> None:
        """A message of a worker that made sense, and what is sent to it at once."""
        counters = self._of.setdefault(worker, WorkerCounters())
        counters.pulls += message.kind == "pull"
        counters.pushed_bytes += _bytes_of(message)
        for answer in answers:
            counters.pulled_bytes += _bytes_of(answer)
            if answer.kind == "pushed" and answer.fields["fresh"]:
                counters.pushes += 1
                counters.staleness += answer.fields.get("staleness", 0)

    def fields(self) -> dict[str, list[int]]:
        """By worker, as it goes over the wire; the opposite of `counters_of`."""
        return {str(worker): list(astuple(counters)) for worker, counters in sorted(self._of.items())}


def counters_of(fields: Mapping[str, Sequence[int]]) -> dict[int, WorkerCounters]:
    """What a server has sent."""
    return {int(worker): WorkerCounters(*numbers) for worker, numbers in fields.items()}


def total_of(counters: Iterable[WorkerCounters]) -> WorkerCounters:
    """Their sum."""
    return WorkerCounters(*map(sum, zip(*map(astuple, counters), strict=True)))


def _bytes_of(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message.tensors)
