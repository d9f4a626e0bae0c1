"""`disttrain logs`: lines on standard output, on a terminal with a colour for each rank."""

import os
import signal
import zlib
from collections.abc import Callable, Iterator

from disttrain.client import Client
from disttrain.jobs import hint
from disttrain.logs.follow import follow_lines, lines_now
from disttrain.logs.pick import Line, Pick, parse_ranks
from disttrain.output import show
from disttrain.terminal import is_terminal, painted

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_DIM = 90


def show_logs(
    client: Client, name: str, *, ranks: str | None, attempt: int | None, tail: int | None, follow: bool
) -> int:
    """Show the lines; while following, until the job has finished or Ctrl-C."""
    pick = Pick(ranks=parse_ranks(ranks), attempt=attempt)
    job = client.get(name)
    follow = follow and not job.finished
    if follow:
        # There is nothing to clean up, and readers of logs wait in threads.
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    lines = follow_lines(client, job, pick, tail=tail) if follow else lines_now(client, job, pick, tail=tail)
    paint = _painted if is_terminal() and "NO_COLOR" not in os.environ else _plain
    for text in _with_attempts(lines, paint, many=follow and attempt is None):
        show(text)
    hint(f"disttrain why {name}")
    return 0


def _with_attempts(lines: Iterator[Line], paint: Callable[[Line], str], *, many: bool) -> Iterator[str]:
    """Yield the lines; where attempts follow each other, a line between them."""
    last = None
    for line in lines:
        if many and last is not None and line.attempt > last:
            yield f"--- attempt {line.attempt} ---"
        last = line.attempt if last is None else max(last, line.attempt)
        yield paint(line)


def _plain(line: Line) -> str:
    return line.text


def _painted(line: Line) -> str:
    kind, _, number = line.source.partition(" ")
    place = int(number) if number.isdecimal() else zlib.crc32(line.source.encode())
    colour = _DIM if kind == "agent" else _COLOURS[place % len(_COLOURS)]
    return painted(f"[{line.source}]", colour, f" {line.content}")
