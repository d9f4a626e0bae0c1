"""Texts of others for a terminal, and tables. A job's name, message or log line may hold anything; it stays text."""

import io
import os
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from disttrain_api.bounds import cut
from disttrain_api.escape import escaped

MAX_CELL = 4096
MAX_LOG_LINE = 1000
"""Bytes of a line of a log that stands among sentences; the log itself has the whole."""
_CSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")


class Painted(str):
    """A text with colours of our own; all else in it has been escaped."""


def plain(text: Any, *, most: int = MAX_CELL) -> str:
    """Return the text as one line that no terminal takes for a command.

    Line ends become spaces.
    """
    return escaped(str(text)[:most]).strip()


def plain_lines(text: Any, *, most: int = MAX_CELL) -> str:
    """Return the text with its line ends, and all else as `plain` does."""
    return escaped(str(text)[:most], lines=True)


def plain_log(line: bytes) -> str:
    """Return a line of a log without colours; of what was overwritten with \\r, what was seen last."""
    text = line.decode(errors="replace").rstrip("\r\n")
    return escaped(_CSI.sub("", text).rpartition("\r")[2])


def last_lines(lines: Sequence[str], count: int) -> list[str]:
    """Return the last lines of a log as a person is shown them beside other sentences: none of them is long."""
    return [cut(plain_log(line.encode()), MAX_LOG_LINE) for line in lines[len(lines) - min(count, len(lines)) :]]


def painted(text: str, colour: int, after: str = "") -> Painted:
    """Return the text in a colour (30 to 97), and another one after it without."""
    return Painted(f"\x1b[{colour}m{escaped(text)}\x1b[0m{escaped(after)}")


def is_terminal() -> bool:
    """Return whether the command's result goes to a terminal."""
    try:
        return os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"
    except OSError:
        return False


def console(stream: Any = None, *, terminal: bool | None = None) -> Any:
    """Return rich's console into `stream`: as wide as the terminal, else as wide as the text. It reads no markup."""
    from disttrain.plain_console import PlainConsole

    terminal = is_terminal() if terminal is None else terminal
    width = None
    if not terminal:
        width = 100_000
    elif not os.environ.get("COLUMNS"):
        try:
            width = os.get_terminal_size(1).columns
        except OSError:
            width = None
    return PlainConsole(
        file=stream or io.StringIO(), force_terminal=terminal, width=width, markup=False, highlight=False, emoji=False
    )


def rendered(*renderables: Any) -> Painted:
    """Return what rich makes of them, for standard output; lines have no blanks at their end."""
    out = console()
    for one in renderables:
        out.print(one, soft_wrap=isinstance(one, str))
    return Painted("\n".join(line.rstrip() for line in out.file.getvalue().rstrip("\n").split("\n")))


_COLOURS = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Restarting": "yellow",
    "Pending": "yellow",
    "Starting": "cyan",
    "Suspending": "magenta",
    "Suspended": "magenta",
}


def table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    """Return a table as kubectl prints one: no lines, no cell broken. Phases have colours on a terminal."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold", show_edge=False)
    for heading in headings:
        made.add_column(heading, no_wrap=True, overflow="ellipsis")
    for row in rows:
        cells = [plain(cell) for cell in row]
        made.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in cells))
    return made


def age(since: datetime | None, now: datetime) -> str:
    """Return the time between as kubectl does: 42s, 12m, 5h12m, 3d; "-" where it is not known."""
    return "-" if since is None else duration((now - since).total_seconds())


def steps(step: int, total: int) -> str:
    """Return "3/9"; of a job whose checkpoint has more steps than it has itself, that it is past them."""
    return f"{step}/{total}" if step <= total else f"{step} (past {total})"


def duration(seconds: float) -> str:
    """Return seconds in the two largest units that count: 42s, 12m, 5h12m, 3d4h."""
    left = max(int(seconds), 0)
    if left < 120:
        return f"{left}s"
    if left < 3 * 3600:
        return f"{left // 60}m"
    if left < 48 * 3600:
        return f"{left // 3600}h" + (f"{left % 3600 // 60}m" if left % 3600 >= 60 else "")
    return f"{left // 86400}d" + (f"{left % 86400 // 3600}h" if left % 86400 >= 3600 and left < 10 * 86400 else "")
