"""Texts of others as text: what a terminal, a log or an Event would take for a command is written out as an escape.

A manifest, a status, an Event, a line of a log, a metric's name or an exception may hold anything.
"""

import unicodedata


def escaped(text: str, *, lines: bool = False) -> str:
    """Return the text with nothing in it that has an effect in place of a shape.

    Control characters, marks of direction, halves of characters and what has no width become escapes such as `\\x1b`.
    Tabs stay. Line ends stay with `lines`, and become spaces where the text is to be one line.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _instead(c, lines) for c in text)


def _instead(character: str, lines: bool) -> str:
    if character == "\t" or (lines and character == "\n"):
        return character
    if character == "\n" or unicodedata.category(character) == "Zs":
        return " "
    return character.encode("unicode_escape", "surrogatepass").decode()
