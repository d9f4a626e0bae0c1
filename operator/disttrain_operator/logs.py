"""Log lines: for people, or one JSON object each. What others have written cannot pass for a line, or for a command."""

import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any

import orjson

from disttrain_api.escape import escaped


class TextFormatter(logging.Formatter):
    """One line per record, and those of a traceback after it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        return escaped(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return _traceback(ei)


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": escaped(record.getMessage(), lines=True),
        }
        if record.exc_info:
            line["traceback"] = _traceback(record.exc_info)
        return orjson.dumps(line).decode()


def _traceback(ei: Any) -> str:
    """Format as Python does, but with the exception's text, which may be foreign, in one line."""
    parts = (part.removesuffix("\n") for part in traceback.format_exception(*ei))
    # Frames are indented; before "During handling of …" there is an empty line.
    return "\n".join(escaped(part, lines=part.startswith((" ", "\n"))) for part in parts)


def set_up_logging(level: str, *, json_lines: bool) -> None:
    """Log to stderr. kopf logs at level DEBUG alone: the operator says the same in one line, without tracebacks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(logging.DEBUG if level == "DEBUG" else logging.CRITICAL)
