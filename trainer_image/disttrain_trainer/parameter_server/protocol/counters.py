"""What a server has done for each worker, counted from the messages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

from disttrain_trainer.parameter_server.protocol.wire import Message


@dataclass
class Tally:
    """Since the server began. staleness: sum over the pushes; bytes: of tensors, headers not included."""

    pushes: int = 0
    pulls: int = 0
    staleness: int = 0
    pushed_bytes: int = 0
    pulled_bytes: int = 0

    def __sub__(self, other: Tally) -> Tally:
        return Tally(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


class Tallies:
    """The tally of each worker that this server has heard of."""

    def __init__(self) -> None:
        self._of: dict[int, Tally] = {}

    def count(self, worker: int, message: Message, answers: Sequence[Message]) -> None:
        """A message of a worker that made sense, and what is sent to it at once."""
        tally = self._of.setdefault(worker, Tally())
        tally.pulls += message.kind == "pull"
        tally.pushed_bytes += _bytes_of(message)
        for answer in answers:
            tally.pulled_bytes += _bytes_of(answer)
            if answer.kind == "pushed" and answer.fields["fresh"]:
                tally.pushes += 1
                tally.staleness += answer.fields.get("staleness", 0)

    def fields(self) -> dict[str, list[int]]:
        """By worker, as it goes over the wire; the opposite of `tallies_of`."""
        return {str(worker): list(astuple(tally)) for worker, tally in sorted(self._of.items())}


def tallies_of(fields: Mapping[str, Sequence[int]]) -> dict[int, Tally]:
    """What a server has sent."""
    return {int(worker): Tally(*numbers) for worker, numbers in fields.items()}


def total_of(tallies: Iterable[Tally]) -> Tally:
    """Their sum."""
    return Tally(*map(sum, zip(*map(astuple, tallies), strict=True)))


def _bytes_of(message: Message) -> int:
    return sum(tensor.nbytes for tensor in message.tensors)
