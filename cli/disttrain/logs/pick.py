"""Which pods and lines of a job's logs are meant. Pure: no request is made here."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from disttrain.errors import USAGE, CommandError
from disttrain.terminal import plain_log
from disttrain_api.names import CONTAINER, Label, Role

Raw = Mapping[str, Any]

_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")
BEFORE = re.compile(r"\[(rank (\d{1,7})|agent)\] ")
MAX_RANKS = 100_000


@dataclass(frozen=True)
class Pick:
    """Which ranks, and which attempt."""

    ranks: frozenset[int] | None = None
    """None: all, and the parameter servers."""
    attempt: int | None = None
    """None: the current one, and while following all that come."""


@dataclass(frozen=True)
class PodLog:
    """A pod whose log is meant."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: int
    ranks: range
    started: bool
    """Its container runs or has run: there is a log."""
    ended: bool


@dataclass(frozen=True)
class Line:
    """A line of a log."""

    time: int
    """Nanoseconds since 1970 on the clock of its node; 0 where it has none."""
    source: str
    """`rank 3`, `agent 1` (that of worker 1), `worker 1`, or `ps 0`."""
    content: str
    attempt: int

    @property
    def text(self) -> str:
        """The line with its rank or pod in front."""
        return f"[{self.source}] {self.content}"


def parse_ranks(text: str | None) -> frozenset[int] | None:
    """ "0,4-7" -> {0, 4, 5, 6, 7}; None -> None. Raises CommandError."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= MAX_RANKS:
            raise CommandError(f"--rank {text}: expected ranks such as 0, 0,3 or 4-7", USAGE)
        found.update(range(first, last + 1))
    return frozenset(found)


def ranks_per_pod(spec: Any) -> int:
    """Return the ranks of each worker pod of a raw spec; 1 where it cannot be read."""
    workers = spec.get("workers") if isinstance(spec, Mapping) else None
    for name in ("processesPerPod", "gpusPerPod"):
        found = workers.get(name) if isinstance(workers, Mapping) else None
        if isinstance(found, int) and not isinstance(found, bool) and found > 0:
            return found
    return 1


def picked(pods: Iterable[Raw], spec: Any, pick: Pick) -> list[PodLog]:
    """Return the pods whose logs are meant: by attempt, role and index. Pods with labels of others are left out."""
    each = ranks_per_pod(spec)
    read = [pod for pod in (_pod(raw, each) for raw in pods) if pod is not None]
    if pick.ranks is not None:
        read = [pod for pod in read if pod.role is Role.WORKER and not pick.ranks.isdisjoint(pod.ranks)]
    if pick.attempt is not None:
        read = [pod for pod in read if pod.attempt == pick.attempt]
    return sorted(read, key=lambda pod: (pod.attempt, pod.role is Role.PS, pod.index))


def newest(pods: list[PodLog]) -> list[PodLog]:
    """Return the pods of the last attempt that has any."""
    last = max((pod.attempt for pod in pods), default=0)
    return [pod for pod in pods if pod.attempt == last]


def _pod(raw: Raw, each: int) -> PodLog | None:
    try:
        metadata = raw["metadata"]
        labels = metadata["labels"]
        role, index = Role(labels[Label.ROLE]), int(labels[Label.INDEX])
        status = raw.get("status") or {}
        container: Raw = next(
            (entry for entry in status.get("containerStatuses") or [] if entry.get("name") == CONTAINER), {}
        )
        state = container.get("state") or {}
        return PodLog(
            name=str(metadata["name"]),
            uid=str(metadata["uid"]),
            role=role,
            index=index,
            attempt=int(labels[Label.ATTEMPT]),
            ranks=range(index * each, (index + 1) * each) if role is Role.WORKER else range(0),
            started="running" in state or "terminated" in state,
            ended="terminated" in state,
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def line_of(pod: PodLog, raw: bytes, pick: Pick) -> Line | None:
    """Return a line with its time, as `timestamps=true` gives it; None where it is of a rank that is not meant."""
    stamp, _, rest = raw.partition(b" ")
    time = nanoseconds(stamp)
    text = plain_log(rest if time else raw)
    match = BEFORE.match(text)
    if match is None:
        return Line(time, _source(pod), text, pod.attempt)
    text = text[match.end() :]
    if match[2] is None:
        return None if pick.ranks is not None else Line(time, f"agent {pod.index}", text, pod.attempt)
    rank = int(match[2])
    # What a program prints in the agent's form about a rank of another pod is its own line.
    if rank not in pod.ranks:
        return Line(time, _source(pod), f"{match[0]}{text}", pod.attempt)
    return None if pick.ranks is not None and rank not in pick.ranks else Line(time, match[1], text, pod.attempt)


def _source(pod: PodLog) -> str:
    if pod.role is Role.WORKER and len(pod.ranks) == 1:
        return f"rank {pod.ranks[0]}"
    return f"{pod.role} {pod.index}"


_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


def nanoseconds(stamp: bytes) -> int:
    """Return RFC 3339's time of a container's log line in nanoseconds since 1970; 0 where it is none."""
    match = _STAMP.fullmatch(stamp)
    if match is None:
        return 0
    try:
        seconds = datetime.fromisoformat(f"{match[1].decode()}{match[3].decode()}").timestamp()
    except (ValueError, OverflowError):
        return 0
    return int(seconds) * 10**9 + int((match[2] or b"0").ljust(9, b"0"))
