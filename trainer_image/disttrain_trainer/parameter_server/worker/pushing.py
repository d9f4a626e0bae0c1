"""One push of a worker, of which each bucket is sent as soon as it is full, while the backward pass goes on.

A parameter's gradient is complete when it has been accumulated as often as there are microbatches; one that is used in
fewer of them waits for the end. A bucket that comes from a GPU leaves when its copy in the host's memory is complete,
for which nothing waits before the end. ZeroMQ's own thread moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from disttrain_trainer.parameter_server.protocol import buckets
from disttrain_trainer.parameter_server.protocol.placement import Placement
from disttrain_trainer.parameter_server.protocol.wire import Message
from disttrain_trainer.parameter_server.worker.payload import Payload
from disttrain_trainer.parameter_server.worker.staging import Event
from disttrain_trainer.runtime.errors import InvalidConfiguration

Send = Callable[[int, Message], None]
"""Server and message; returns at once, and nothing is answered."""


@dataclass
class _Written:
    """Written data for one server: tensors of each range, in full buckets or waiting for one to be full."""

    full: dict[int, list[Tensor]] = field(default_factory=dict)
    waiting: dict[int, list[Tensor]] = field(default_factory=dict)
    parts: int = 0

    @property
    def waiting_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self.waiting.values() for tensor in tensors)


class Pushing:
    """`fields`: of the push to each server, beside what its tensors are."""

    def __init__(self, placement: Placement, payload: Payload, fields: Sequence[Mapping[str, Any]], send: Send) -> None:
        self._placement, self._payload, self._fields, self._send = placement, payload, fields, send
        self._written = [_Written() for _ in placement]
        self._full: list[tuple[Event, int, dict[int, list[Tensor]]]] = []
        """Buckets that are full and not sent, with the event after which they are complete."""
        self._places: dict[str, list[tuple[int, int]]] = {}
        for server, segments in enumerate(placement):
            for index, segment in enumerate(segments):
                self._places.setdefault(segment.name, []).append((server, index))

    def ready(self, name: str) -> None:
        """The gradient of a parameter is complete: write it, and send the buckets that are full by that."""
        for server, index in self._places.get(name, ()):
            written = self._written[server]
            written.waiting[index] = self._payload.of(server, index)
            if written.waiting_bytes >= buckets.BUCKET_BYTES:
                self._full.append((self._payload.staging.record_event(), server, written.waiting))
                written.parts += 1
                written.full |= written.waiting
                written.waiting = {}
        self._send_full()

    def skip(self) -> None:
        """It is not to count, which is known before any of it is sent."""
        self._fields = [{**fields, "weight": 0.0} for fields in self._fields]

    def rest(self) -> list[Message]:
        """The message that completes the push to each server."""
        found = []
        for server, segments in enumerate(self._placement):
            written = self._written[server]
            for index in range(len(segments)):
                if index not in written.full and index not in written.waiting:
                    written.waiting[index] = self._payload.of(server, index)
            fields = self._described(server, written.waiting)
            found.append(Message("push", {**fields, "parts": written.parts}, _flat(written.waiting)))
        self._payload.staging.record_event().synchronize()
        self._send_full()
        return found

    def whole(self, server: int) -> Message:
        """All of it in one message, after `rest`."""
        everything = {**self._written[server].full, **self._written[server].waiting}
        return Message("push", self._described(server, everything), _flat(everything))

    def _send_full(self) -> None:
        """Send the full buckets that have reached the host's memory, in turn."""
        while self._full and self._full[0][0].query():
            _, server, ranges = self._full.pop(0)
            self._send(server, Message("part", self._described(server, ranges), _flat(ranges)))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors, after `rest`."""
        return sum(tensor.nbytes for server in range(len(self._placement)) for tensor in self.whole(server).tensors)

    def _described(self, server: int, ranges: Mapping[int, list[Tensor]]) -> dict[str, Any]:
        named = {index: len(tensors) for index, tensors in ranges.items() if tensors}
        return {**self._fields[server], "ranges": list(named), "counts": list(named.values())}


@contextmanager
def watched(parameters: Mapping[str, nn.Parameter], microbatches: int, ready: Callable[[str], None]) -> Iterator[None]:
    """Calls `ready` with the name of each parameter whose gradient is complete.

    Raises InvalidConfiguration where a gradient goes on growing after that.
    """
    counts = dict.fromkeys(parameters, 0)

    def accumulated(name: str) -> None:
        counts[name] += 1
        if counts[name] == microbatches:
            ready(name)
        elif counts[name] > microbatches:
            raise InvalidConfiguration(
                f"`training.model`: the gradient of {name} is accumulated several times in one backward pass, as with "
                "torch.utils.checkpoint(use_reentrant=True): use use_reentrant=False"
            )

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated(name))
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _flat(ranges: Mapping[int, list[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in ranges.values() for tensor in tensors]
