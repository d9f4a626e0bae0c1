"""Event files for TensorBoard: the figures of metrics.jsonl, under the same names."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_trainer.errors import InvalidConfiguration

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"


class Events:
    """Writes figures; nothing where there is no writer."""

    def __init__(self, writer: SummaryWriter | None = None) -> None:
        self._writer = writer

    def write(self, values: dict[str, Any]) -> None:
        """Every number in `values` at its `step`."""
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                if name != "step" and value is not None:
                    self._writer.add_scalar(name, value, values["step"])
            # A rank may be killed at any time, and it ends without tear-down.
            self._writer.flush()
        except OSError as error:
            # The writer does not recover.
            self._writer = None
            _say_lost(error)

    def close(self) -> None:
        """Nothing is left to do: each line was flushed."""


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
    from torch.utils.tensorboard import SummaryWriter  # imported where it is used: it takes half a second

    try:
        return Events(SummaryWriter(str(folder / FOLDER)))
    except OSError as error:
        _say_lost(error)
        return Events()


def _say_lost(error: OSError) -> None:
    """Event files that cannot be written are no reason to end a training."""
    print(f"disttrain: no more event files for TensorBoard: {error.strerror}", file=sys.stderr, flush=True)
