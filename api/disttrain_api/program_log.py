"""What the end of a program's log tells of its failure: torchrun's table of the ranks that failed, Python's exceptions.

Any program may print anything: what is no such table, or no exception, is passed by. Pure.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MAX_LOG = 64 * 1024
"""Characters that are looked at, the last ones."""
_MAX_EXCEPTION = 500

# gloo and NCCL report a peer that is gone as a plain RuntimeError; its text is all there is.
_PEER_LOST = re.compile(
    r"gloo[/\\]|Connection (closed|reset) by peer|Broken pipe|ncclRemoteError|Socket Timeout|recvValue failed"
)
_SIGTERM = 15

_ROOT = "Root Cause (first observed failure):"
_TITLE = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_ENTRY = re.compile(r"\[\d+\]:\s*$")
_RANK = re.compile(r"\s+rank\s*:\s*(\d{1,9})\s+\(local_rank:\s*(\d{1,9})\)")
_EXIT_CODE = re.compile(r"\s+exitcode\s*:\s*(-?\d{1,4})\b")
_RULE = re.compile(r"(=+|-+)\s*$")
_TRACEBACK = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s*File "[^"]+", line \d+')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |$)")
_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)(: |$)")
# torch prints the exceptions of a rank like this once it has joined its process group.
_OF_RANK = re.compile(r"\[rank(\d{1,9})\]: ?")


@dataclass(frozen=True)
class Child:
    """The rank that torchrun names as the first that failed."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    exception: str | None = None
    """Its exception, where the log still holds it."""
    lost_a_peer: bool = False
    """Whether it failed because another rank was gone."""

    @property
    def signal(self) -> int | None:
        return -self.exit_code if self.exit_code < 0 else None


def lost_a_peer(text: str) -> bool:
    """Return whether an error's text tells that another rank, or the way to it, is gone."""
    return _PEER_LOST.search(text) is not None


def torchrun_child(log: str) -> Child | None:
    """Return the child that made torchrun fail; None where no table of torchrun's ends the log.

    torchrun stops the others with SIGTERM, and may see several ends at once: a child that was stopped, or lost a peer,
    is not the first that failed where there is another.
    """
    lines = log[-MAX_LOG:].splitlines()
    root = _last(lines, lambda line: line.strip() == _ROOT)
    if root is None:
        return None
    title = _last(lines[:root], lambda line: line.startswith(_TITLE))
    before = lines[: _begin_of_own_traceback(lines, root if title is None else title)]
    found = list(_children(lines[root:], before))
    if not found:
        return None
    if title is not None:
        found += _children(lines[title:root], before)
    return min(found, key=_distance)


def last_exception(log: str) -> str | None:
    """Return `Type: message` of the last exception whose traceback is in the log; None where there is none."""
    return _exception([_OF_RANK.sub("", line, count=1) for line in log[-MAX_LOG:].splitlines()])


def of_torchrun_child(log: str) -> str:
    """Return the log with nothing of other children and of torchrun's own frames, so that little of it tells all.

    As it is where torchrun has not failed.
    """
    child, lines = torchrun_child(log), log.splitlines()
    title = _last(lines, lambda line: line.startswith(_TITLE))
    root = _last(lines, lambda line: line.strip() == _ROOT)
    if child is None or title is None or root is None:
        return log
    own = [line for line in lines[: _begin_of_own_traceback(lines, title)] if _rank_of(line) in (None, child.rank)]
    is_root = any(found.rank == child.rank for found in _children(lines[root:], ()))
    return "\n".join([*own, lines[title], *lines[root if is_root else title + 1 :]])


def _children(table: Sequence[str], before: Sequence[str]) -> Iterable[Child]:
    """The entries of a part of torchrun's table. before: the log before torchrun has said anything."""
    starts = [place for place, line in enumerate(table) if _ENTRY.match(line)]
    for start, end in pairwise([*starts, len(table)]):
        entry = table[start + 1 : end]
        rank, code = _first(_RANK, entry), _first(_EXIT_CODE, entry)
        if rank is not None and code is not None:
            exception = _recorded(entry) or _printed(before, rank) if code > 0 else None
            # The line with the exception's type may be cut off.
            told = exception or "\n".join(line for line in before if _rank_of(line) in (None, rank))
            yield Child(rank, code, exception, code > 0 and lost_a_peer(told))


def _distance(child: Child) -> int:
    """Smaller is nearer to the cause; of equals the root cause comes first."""
    return 2 if child.signal == _SIGTERM else int(child.lost_a_peer)


def _recorded(entry: Sequence[str]) -> str | None:
    """The exception in the entry itself: of a program whose main function is decorated with torch's `record`."""
    lines = [line for line in entry if not _RULE.match(line)]
    return _exception([line.strip() if not line.startswith("    ") else line for line in lines])


def _printed(before: Sequence[str], rank: int) -> str | None:
    """The exception that the rank has printed; where no line has a rank, the last one that any has."""
    named = [(match, line) for line in before if (match := _OF_RANK.match(line))]
    if not named:
        return _exception(before)
    own = [line[match.end() :] for match, line in named if int(match[1]) == rank]
    # Its frames may be cut off.
    last = _last(own, lambda line: _ERROR.match(line) is not None)
    return _exception(own) or (None if last is None else own[last][:_MAX_EXCEPTION].rstrip())


def _exception(lines: Sequence[str]) -> str | None:
    last = _last(lines, lambda line: _FRAME.match(line) is not None)
    if last is None:
        return None
    # Below a frame stand its code and marks, which are indented.
    found = next((line for line in lines[last + 1 :] if line and not line[0].isspace()), "")
    return found[:_MAX_EXCEPTION].rstrip() if _EXCEPTION.match(found) else None


def _begin_of_own_traceback(lines: Sequence[str], title: int) -> int:
    """Where the traceback begins whose last line is this one; this line where it has none."""
    last = _last(lines[:title], lambda line: not line[:1].isspace())
    if last is None:
        return 0
    return last if lines[last].startswith(_TRACEBACK) else title


def _rank_of(line: str) -> int | None:
    return _first(_OF_RANK, [line])


def _first(pattern: re.Pattern[str], lines: Iterable[str]) -> int | None:
    return next((int(match[1]) for line in lines if (match := pattern.match(line))), None)


def _last(lines: Sequence[str], holds: Callable[[str], bool]) -> int | None:
    return next((place for place in reversed(range(len(lines))) if holds(lines[place])), None)
