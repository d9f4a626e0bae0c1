"""Numbers on their way from a GPU to the servers: copied into pinned memory beside what the GPU computes."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor


class Fence(Protocol):
    """A moment in a device's work, as torch.cuda.Event has it."""

    def query(self) -> bool:
        """Whether it is past."""
        ...

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Past:
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
        self._stream: torch.cuda.Stream | None = None

    def down(self, place: Hashable, value: Tensor) -> Tensor:
        """The value in the host's memory, which it is once a later fence is past. One buffer for each `place`."""
        if value.device.type == "cpu":
            return value
        if self._stream is None:
            self._stream = torch.cuda.Stream(value.device)
        buffer = self._buffers.get(place)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            self._buffers[place] = buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        # Not in the stream that computes: the rest of the backward pass would wait for the copy.
        self._stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(value.detach(), non_blocking=True)
        value.record_stream(self._stream)
        return buffer

    def fence(self) -> Fence:
        """The moment at which all copies so far are complete."""
        if self._stream is None:
            return Past()
        return self._stream.record_event()
