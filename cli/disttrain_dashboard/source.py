"""Where page data comes from: what a source is asked, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from disttrain_api.status import JobStatus

Raw = Mapping[str, Any]

INTERRUPTED = "Interrupted"
"""Phase of a job that its status says to run, and on which nothing works any more."""


class UnknownJobError(Exception):
    """No job has this key."""


class SourceError(Exception):
    """The source does not answer this; the message is for the user."""

    def __init__(self, message: str, status: int = 503, ask: str = "") -> None:
        """status: of HTTP. ask: what the page asks its reader for, `token` or `namespaces`."""
        super().__init__(message)
        self.status, self.ask = status, ask


@dataclass(frozen=True)
class Job:
    """A job as it is stored, and what its runner knows beyond that."""

    key: str
    """By which the source finds it again: one word, the same for the life of the job."""
    raw: Raw
    step: int | None = None
    """The last step, where that is newer than the status."""
    loss: float | None = None
    rate: float | None = None
    left_seconds: float | None = None
    phase: str | None = None
    """In place of the status' phase."""
    deleted: bool = False
    """It is gone, and this is what the history has kept."""

    @cached_property
    def status(self) -> JobStatus:
        """Its status; empty where it cannot be read: anybody who may write it may put anything there."""
        try:
            return JobStatus.model_validate(self.raw.get("status") or {}, extra="ignore")
        except ValueError:
            return JobStatus()


@dataclass(frozen=True)
class Listing:
    """The jobs of a source, the first of them at least."""

    jobs: Sequence[Job]
    more: str = ""
    """What is missing, as a sentence."""


@dataclass(frozen=True)
class Rank:
    """Where a rank is."""

    pod: str
    node: str
    state: str
    """running, waiting, done, failed or stopped."""
    step: int | None = None


@dataclass(frozen=True)
class Seen:
    """All that a source knows of one job."""

    job: Job
    why: str
    """Why it is where it is."""
    todo: Sequence[str] = ()
    ranks: Mapping[int, Rank] = field(default_factory=dict)
    events: Sequence[Raw] = ()
    """Events of Kubernetes, oldest first."""
    panels: Sequence[Raw] = ()
    """Curves, as disttrain_dashboard.views.curves makes them."""
    place: str = ""
    """Where it is kept."""


class Source(Protocol):
    """Jobs that are looked at, and never changed. Methods may block: each is called in a thread, several at a time."""

    title: str
    seconds: float
    """How long an answer holds."""

    def jobs(self) -> Listing:
        """Return the jobs. Raises SourceError."""

    def job(self, key: str) -> Seen:
        """Return one job. Raises UnknownJobError, and SourceError."""

    def log(self, key: str, rank: int, tail: int) -> Sequence[str]:
        """Return the last lines of a rank's log, `tail` at most. Raises UnknownJobError, and SourceError."""

    def stacks(self, key: str, rank: int) -> str:
        """Return where all threads of a rank are at the moment. Raises UnknownJobError, and SourceError."""
