"""Lines of a rank: on the pod's stdout with the rank's name before them, and the last ones kept for the report."""

import os
import re
import select
from collections import deque

# A line without an end (a progress bar, binary output) is cut here.
_MAX_LINE_BYTES = 16 * 1024
TAIL_LINES = 40
"""Lines of a rank that are part of its failure."""
KEPT_LINES = 400
"""Lines of a rank that can be asked for."""
_KEPT_CHARACTERS = 1000
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


def write_all(data: bytes, fd: int = 1) -> None:
    """Write to the pod's log. A log that cannot be written (closed, disk full) must not end the training."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [])
        except OSError:
            return


def log(text: str) -> None:
    """A line of the agent itself."""
    write_all(f"[agent] {text}\n".encode())


class RankOutput:
    """Cuts what a rank prints into lines. rank: None for a program with several, whose output is passed on as it is."""

    def __init__(self, rank: int | None) -> None:
        self._prefix = b"" if rank is None else f"[rank {rank}] ".encode()
        self._rest = b""
        self._last: deque[str] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Pass on the complete lines of `data`."""
        if not self._prefix:
            write_all(data)
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) >= _MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        self._pass_on(lines)

    def finish(self) -> None:
        """The rank has ended: its last line may lack an end."""
        if self._rest:
            self._pass_on([self._rest])
            self._rest = b""

    @property
    def tail(self) -> list[str]:
        """The last lines, without control codes; of a line that was overwritten with \\r, what was seen last."""
        return self.last(TAIL_LINES)

    def last(self, count: int) -> list[str]:
        """The last `count` lines, KEPT_LINES at most, as in `tail`."""
        return list(self._last)[-count:] if count > 0 else []

    def _pass_on(self, lines: list[bytes]) -> None:
        if not lines:
            return
        if self._prefix:
            write_all(b"".join(self._prefix + line + b"\n" for line in lines))
        for line in lines[-KEPT_LINES:]:
            text = _CONTROL.sub("", line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]).rstrip()
            if text:
                self._last.append(text[:_KEPT_CHARACTERS])
