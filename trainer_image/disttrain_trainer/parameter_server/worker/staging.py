"""Numbers on their way from a GPU to the servers: copied into pinned memory beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from disttrain_trainer.runtime.device import CopyStream, in_host_memory


class Event(Protocol):
    """A moment in a device's work, as torch's events have it."""

    def query(self) -> bool:
        """Whether it is past."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class PastEvent:
    """A moment of a device that computes nothing ahead."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """It is past."""


class Staging:
    """Copies into the same buffers in each push: pinned memory is dear to make.

    What was copied for a push must have been sent when the next one begins; answers of servers say so.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._stream: CopyStream | None = None

    def down(self, place: Hashable, value: Tensor) -> Tensor:
        """The value in the host's memory, which it is once a later event is past. One buffer for each `place`."""
        if in_host_memory(value):
            return value
        if self._stream is None:
            self._stream = CopyStream(value.device)
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            self._buffers[place] = buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        self._stream.copy(value, buffer)
        return buffer

    def record_event(self) -> Event:
        """The moment at which all copies so far are complete."""
        if self._stream is None:
            return PastEvent()
        return self._stream.record_event()
