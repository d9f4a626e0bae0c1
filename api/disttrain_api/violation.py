"""One thing that is wrong with a manifest, and where."""

import re
from dataclasses import dataclass, replace
from typing import Any

Location = tuple[str | int, ...]

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_MAX_KEY = 100


@dataclass(frozen=True)
class Violation:
    """A problem at a place of a manifest, and what to do about it."""

    location: Location
    """Keys and list indices from the top of the manifest."""
    message: str
    """A sentence without a full stop."""
    found: Any = None
    """The value that stands there, None where there is none."""
    hint: str | None = None
    """What to do, where the message does not say it."""
    meant: str | None = None
    """The key that was probably meant, where this one does not exist."""
    line: int | None = None
    """Line of the file, from 1; None where the manifest came from no file."""

    @property
    def path(self) -> str:
        """The place as people write it: `spec.workers.template.spec.containers[0].image`."""
        return render(self.location)

    def at(self, line: int | None) -> "Violation":
        """The same, with its line."""
        return replace(self, line=line)

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.location else self.message
        return f"{text}; {self.hint}" if self.hint else text


def render(location: Location) -> str:
    """Keys and indices as one dotted path."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        part = part if len(part) <= _MAX_KEY else f"{part[: _MAX_KEY - 1]}…"
        if _PLAIN_KEY.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{part!r}]"
    return text
