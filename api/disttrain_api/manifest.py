"""A file -> a job. Nothing else in the project reads manifests."""

from pathlib import Path
from typing import Any

from disttrain_api import yaml12
from disttrain_api.errors import ManifestError
from disttrain_api.names import KIND
from disttrain_api.spec import DistTrainingJob
from disttrain_api.validate import read_job
from disttrain_api.violation import Location, Violation

MAX_BYTES = 1024 * 1024
"""The API server stores no larger object."""


def load(path: str | Path) -> DistTrainingJob:
    """The job in a file. Raises ManifestError with everything that is wrong with it."""
    return parse(_read(Path(path)), source=str(path))


def parse(text: str, source: str = "manifest") -> DistTrainingJob:
    """The job in a text; `source` is what messages call it."""
    document = _only_document(text, source)
    job, found = read_job(document.value)
    if job is None or found:
        placed = [violation.at(_line(document.lines, violation.location)) for violation in found]
        raise ManifestError(source, sorted(placed, key=lambda violation: violation.line or 0))
    return job


def _read(path: Path) -> str:
    source = str(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _refused(source, "no such file") from None
    except IsADirectoryError:
        raise _refused(source, "this is a folder; give the file of one job") from None
    except (OSError, ValueError) as error:
        raise _refused(source, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(content) > MAX_BYTES:
        raise _refused(source, f"larger than {MAX_BYTES} bytes, which no Kubernetes object can be")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _refused(source, "not UTF-8 text: save the file in that encoding", line) from None


def _only_document(text: str, source: str) -> yaml12.Document:
    try:
        documents = yaml12.read(text)
    except yaml12.YamlError as error:
        raise _refused(source, str(error), error.line) from None
    if not documents:
        raise _refused(source, f"empty: it must hold a {KIND}")
    if len(documents) > 1:
        kinds = ", ".join(_kind(document.value) for document in documents)
        raise _refused(source, f"{len(documents)} documents ({kinds}): put each job in a file of its own")
    return documents[0]


def _kind(value: Any) -> str:
    return str(value.get("kind", "of no kind")) if isinstance(value, dict) else "not an object"


def _refused(source: str, message: str, line: int | None = None) -> ManifestError:
    return ManifestError(source, [Violation((), message, line=line)])


def _line(lines: dict[Location, int], location: Location) -> int | None:
    """The line of a place, or of what should hold it."""
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location)
