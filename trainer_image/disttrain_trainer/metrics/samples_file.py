"""Texts that a model has written: lines of the log, and of a file beside metrics.jsonl that does not grow for ever."""

import json
from contextlib import suppress
from pathlib import Path

from disttrain_api.escape import escaped

SAMPLES_FILE = "samples.jsonl"
MAX_FILE_BYTES = 2**24
"""A file that has more becomes `samples.1.jsonl`, in place of the former one."""
_MAX_PROMPT, _MAX_TEXT = 80, 4096


def sample_line(step: int, prompt: str, text: str) -> str:
    """Return a line of the log: a text and its prompt as JSON writes them, with nothing in it that has an effect."""
    return f"sample: {step}  {_quoted(prompt, _MAX_PROMPT)} → {_quoted(text, _MAX_TEXT)}"


def make_room(file: Path) -> None:
    """Begin a new file where this one has become long."""
    with suppress(OSError):
        if file.stat().st_size > MAX_FILE_BYTES:
            file.replace(file.with_stem(f"{file.stem}.1"))


def _quoted(text: str, most: int) -> str:
    more = "" if len(text) <= most else f" … {len(text)} characters"
    return escaped(json.dumps(text[:most], ensure_ascii=False)) + more
