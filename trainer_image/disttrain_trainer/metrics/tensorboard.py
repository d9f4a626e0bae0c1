"""Event files for TensorBoard: the figures of metrics.jsonl, under the same names, and texts that the model writes."""

from __future__ import annotations

import io
import os
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from disttrain_trainer.metrics.sinks.sink import Samples
from disttrain_trainer.runtime.errors import InvalidConfiguration

FOLDER = "tensorboard"
_FORMAT = "brain.Event:2"


class Events:
    """Writes figures and texts; nothing where there is no file.

    torch's SummaryWriter writes in a thread of its own, which prints a traceback when the disk is full.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        """file: not buffered, since a rank may be killed at any time, and ends without tear-down."""
        self._file = file
        self._append(file_version=_FORMAT)

    def write(self, values: dict[str, Any]) -> None:
        """Every number in `values` at its `step`."""
        if self._file is None:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: value for name, value in values.items() if name != "step" and value is not None}
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()])
        self._append(step=values["step"], summary=summary)

    def write_samples(self, step: int, samples: Samples) -> None:
        """Each text below its prompt, as a series `samples/N` for each of them."""
        if self._file is None:
            return
        from torch.utils.tensorboard.summary import text

        for number, (prompt, written) in enumerate(samples):
            shown = f"{_as_it_stands(prompt)}\n\n→\n\n{_as_it_stands(written)}"
            self._append(step=step, summary=text(f"samples/{number}", shown))

    def close(self) -> None:
        """Close the file; each event has been written."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, **event: Any) -> None:
        if self._file is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **event).SerializeToString())
        rest = record.getbuffer()
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            # Half a record may stand there: nothing can follow it.
            self._file.close()
            self._file = None
            _log_lost(error)


def _as_it_stands(text: str) -> str:
    """Return a block of code of Markdown, in which TensorBoard reads texts."""
    # A tokenizer may give halves of characters, which UTF-8 does not have.
    lines = text.encode(errors="replace").decode().splitlines() or [""]
    return "\n".join(f"    {line}" for line in lines)


def open_events(wanted: bool | None, folder: Path | None) -> Events:
    """Raises InvalidConfiguration where event files are wanted and cannot be written."""
    if wanted is False or folder is None:
        if wanted:
            raise InvalidConfiguration(
                "`training.logging.tensorBoard` needs a volume in `spec.storage`, where event files can lie"
            )
        return Events()
    if find_spec("tensorboard") is None:
        if wanted:
            raise InvalidConfiguration(
                "`training.logging.tensorBoard`: the package `tensorboard` is not installed in this image; install it, "
                "or remove the field"
            )
        return Events()
    name = f"events.out.tfevents.{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}"
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        return Events((folder / FOLDER / name).open("xb", buffering=0))
    except OSError as error:
        _log_lost(error)
        return Events()


def _log_lost(error: OSError) -> None:
    """Event files that cannot be written are no reason to end a training."""
    print(f"disttrain: no more event files for TensorBoard: {error.strerror}", file=sys.stderr, flush=True)
