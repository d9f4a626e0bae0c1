"""The ranks' side of a request for a checkpoint: a file of the pod that its agent touches."""

import os
from contextlib import suppress
from pathlib import Path

from disttrain_agent.checkpoint_request import checkpoint_request_file


class CheckpointRequest:
    """Whether somebody has asked for a checkpoint since the last answer.

    The file is there as soon as a request is heard, and tells the agent that one may be made. All ranks of the pod see
    the same file: those whose answer came in between do not take an answered request for a new one.
    """

    def __init__(self, folder: Path | None) -> None:
        """folder: of the ranks' reports; None: nobody can ask."""
        self._file = None if folder is None else checkpoint_request_file(folder)
        self._answered = 0
        if self._file is not None:
            self._answered = _offered(self._file)

    @property
    def pending(self) -> bool:
        """Whether a request has come that is not answered."""
        return self._asked != self._answered

    def answered(self) -> None:
        """A checkpoint of the state as it is now follows: it answers whatever was asked so far."""
        self._answered = self._asked

    @property
    def _asked(self) -> int:
        """When it was asked for last, in nanoseconds."""
        if self._file is None:
            return self._answered
        try:
            return self._file.stat().st_mtime_ns
        except OSError:
            # Whoever removed it asks for nothing.
            return self._answered


def _offered(file: Path) -> int:
    """Make the file unless another rank of the pod has; return when it was last touched, as far as is answered."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    # A rank without a place for it trains all the same.
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        try:
            made = part.stat().st_mtime_ns
            # Not made in place: a request could come before its time is read.
            os.link(part, file)
            return made
        except FileExistsError:
            return file.stat().st_mtime_ns
        finally:
            part.unlink(missing_ok=True)
    return 0
