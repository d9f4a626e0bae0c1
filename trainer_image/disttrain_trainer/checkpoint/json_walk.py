"""JSON of anybody's, entry for entry: no more of it is ever in memory as objects than one entry, which has a bound.

A parser that builds all of it first makes 26 bytes of memory for each byte of `[{},{},…`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

MAX_ENTRY = 4096
"""Characters. A tensor of 64 dimensions has 1,500."""
_SPACE = re.compile(r"[ \t\n\r]*")


class NotJson(ValueError):  # noqa: N818 - said of a text, not of what went wrong
    """The text is no JSON, or has an entry beyond its bound; the message says what was found where."""


def _no_constant(name: str) -> NoReturn:
    raise NotJson(f"the number {name}")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class Walk:
    """A place in a text, which goes on with each value that is taken. Methods raise NotJson."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def next_sign(self) -> str:
        """Return the sign with which the next value begins; an empty text at the end."""
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found is not None else self._at
        return self._text[self._at : self._at + 1]

    def items(self) -> Iterator[str]:
        """Yield the names in an object; each time its value must be taken before the next one is asked for."""
        self._take("{")
        if self.next_sign() == "}":
            self._take("}")
            return
        while True:
            name = self.text()
            self._take(":")
            yield name
            if self._take(",}") == "}":
                return

    def text(self) -> str:
        """Take a text of any length."""
        self._require('"')
        at = self._at
        try:
            found, self._at = _DECODER.raw_decode(self._text, at)
            # Half a surrogate is no text, and nothing that is written takes it.
            found.encode()
        except ValueError as error:
            raise NotJson(f"a text that is none at character {at} ({error!s:.80})") from None
        return str(found)

    def value(self, most: int = MAX_ENTRY) -> Any:
        """Take a value of at most so many characters."""
        self.next_sign()
        part = self._text[self._at : self._at + most]
        try:
            found, length = _DECODER.raw_decode(part)
        except NotJson as error:
            raise NotJson(f"{error} at character {self._at}") from None
        except (ValueError, RecursionError):
            found = "an entry of more than" if len(part) == most else "something else than a value in"
            raise NotJson(f"{found} {most} characters at character {self._at}") from None
        self._at += length
        return found

    def end(self) -> None:
        """Take the end of the text."""
        if self.next_sign():
            raise NotJson(f"more after its end at character {self._at}")

    def _require(self, signs: str) -> str:
        sign = self.next_sign()
        if not sign or sign not in signs:
            raise NotJson(f"{sign!r} at character {self._at}, expected {' or '.join(signs)}")
        return sign

    def _take(self, signs: str) -> str:
        sign = self._require(signs)
        self._at += 1
        return sign
