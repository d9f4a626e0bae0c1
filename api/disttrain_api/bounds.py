"""How much is kept of texts that others have written: pods, other tenants, the API server."""

from collections.abc import Sequence

MAX_MESSAGE_BYTES = 2048
"""Longest message of a condition or a verdict, and longest list of problems."""
MAX_REASON_LENGTH = 128
MAX_LISTED = 20

_MORE = "…"


def cut(text: str, most: int = MAX_MESSAGE_BYTES) -> str:
    """Return the begin of `text`, at most `most` bytes of UTF-8, with a mark where something is missing.

    A lone surrogate, by which Python stands for a byte of a file name that is no text, becomes a question mark.
    """
    encoded = text[: most + 1].encode(errors="replace")
    if len(encoded) <= most:
        return encoded.decode()
    return encoded[: most - len(_MORE.encode())].decode(errors="ignore") + _MORE


def listed(sentences: Sequence[str], most: int = MAX_MESSAGE_BYTES) -> str:
    """Return the first sentences, then how many more there are: at most MAX_LISTED, and `most` bytes."""
    for count in range(min(len(sentences), MAX_LISTED), 0, -1):
        more = len(sentences) - count
        end = f"; and {more} more" if more else ""
        text = "; ".join(sentences[:count])
        if count == 1 or len((text + end).encode(errors="replace")) <= most:
            return cut(text, most - len(end)) + end
    return ""


def continued(sentence: str, more: str) -> str:
    """A sentence, which others may have written and ended, and what follows from it."""
    return f"{sentence.rstrip('. ')}; {more}"
