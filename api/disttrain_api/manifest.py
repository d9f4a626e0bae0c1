"""A file -> a job, and what stands beside it. Nothing else in the project reads manifests.

What kubectl takes is taken: a file may hold other objects, in documents of their own or in a `List`. None of them is
read here.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from disttrain_api import yaml12
from disttrain_api.bounds import MAX_LISTED
from disttrain_api.errors import ManifestError
from disttrain_api.names import KIND
from disttrain_api.spec import DistTrainingJob
from disttrain_api.structural import shorten
from disttrain_api.validate import read_job
from disttrain_api.violation import Location, Violation
from disttrain_api.yaml12 import Document

MAX_BYTES = 1024 * 1024
"""The API server stores no larger object."""
_LISTS = ("List", f"{KIND}List")
"""Objects that hold others; kubectl takes these one by one."""
_MAX_WORD = 64


@dataclass(frozen=True)
class Manifest:
    """The content of a file."""

    job: DistTrainingJob
    others: str = ""
    """What stands beside the job, in words; '' where that is nothing."""


def load(path: str | Path) -> DistTrainingJob:
    """The job in a file. Raises ManifestError with everything that is wrong with it."""
    return read(path).job


def parse(text: str, source: str = "manifest") -> DistTrainingJob:
    """The job in a text; `source` is what messages call it."""
    return _parsed(text, source).job


def read(path: str | Path) -> Manifest:
    """Return the content of a file. Raises ManifestError."""
    return _parsed(_content(lambda: Path(path).open("rb"), str(path)), str(path))


def read_stream(stream: BinaryIO, source: str) -> Manifest:
    """Return the content of a stream, and close it. Raises ManifestError."""
    return _parsed(_content(lambda: stream, source), source)


def of_object(value: Any, source: str = "manifest") -> DistTrainingJob:
    """The job that an object of a program is, as it would be sent. Raises ManifestError."""
    try:
        plain = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(source, f"is no JSON: {error}") from error
    return _checked(Document(plain), source)


def _parsed(text: str, source: str) -> Manifest:
    document, others = _only_job(_documents(text, source), source)
    if document.problem is not None:
        raise _refused(source, str(document.problem), document.problem.line)
    return Manifest(_checked(document, source), _some([_called(other) for other in others]))


def _checked(document: Document, source: str) -> DistTrainingJob:
    job, found = read_job(document.value)
    if job is None or found:
        placed = [violation.at(_line(document.lines, violation.location)) for violation in found]
        raise ManifestError(source, sorted(placed, key=lambda violation: violation.line or 0))
    return job


def _content(opened: Callable[[], BinaryIO], source: str) -> str:
    try:
        with opened() as file:
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


def _documents(text: str, source: str) -> list[Document]:
    try:
        found = yaml12.read_each(text)
    except yaml12.YamlError as error:
        raise _refused(source, str(error), error.line) from None
    return [part for document in found for part in _items(document)]


def _items(document: Document) -> list[Document]:
    """The objects of a list of objects, each with its own lines; of another document that itself."""
    value = document.value
    items = value.get("items") if _kind(value) in _LISTS else None
    if not isinstance(items, list):
        return [document]
    lines: dict[Any, dict[Location, int]] = defaultdict(dict)
    for location, line in document.lines.items():
        if len(location) > 1 and location[0] == "items":
            lines[location[1]][location[2:]] = line
    return [Document(item, lines[index]) for index, item in enumerate(items)]


def _only_job(documents: list[Document], source: str) -> tuple[Document, list[Document]]:
    """The document of the job, and the others."""
    if not documents:
        raise _refused(source, f"empty: it must hold a {KIND}")
    if len(documents) == 1:
        return documents[0], []
    for document in documents:
        if not _kind(document.value):
            message = f"one of {len(documents)} documents, but no object with a `kind`"
            raise _refused(source, message, document.lines.get(()))
    jobs = [document for document in documents if _kind(document.value) == KIND]
    if len(jobs) != 1:
        found = f"{len(documents)} objects ({_some([*map(_called, documents)])})"
        if not jobs:
            raise _refused(source, f"{found}, and none is a {KIND}")
        raise _refused(source, f"{found}, and {len(jobs)} are a {KIND}: put each job in a file of its own")
    return jobs[0], [document for document in documents if document is not jobs[0]]


def _kind(value: Any) -> str:
    """The kind of an object, '' where it is none."""
    kind = value.get("kind") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def _called(document: Document) -> str:
    metadata = document.value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    kind = shorten(_kind(document.value), _MAX_WORD)
    return f"{kind} {shorten(name, _MAX_WORD)}" if isinstance(name, str) else kind


def _some(words: list[str]) -> str:
    more = len(words) - MAX_LISTED
    return ", ".join(words[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _refused(source: str, message: str, line: int | None = None) -> ManifestError:
    return ManifestError(source, [Violation((), message, line=line)])


def _line(lines: dict[Location, int], location: Location) -> int | None:
    """The line of a place, or of what should hold it."""
    while location and location not in lines:
        location = location[:-1]
    return lines.get(location)
