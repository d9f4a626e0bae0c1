"""Finds the cause of a failure at the end of a program's log: torchrun's table of failed ranks, or Python's exceptions.

Any program may print anything, so text in no such form is skipped. Pure.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

MAX_LOG = 64 * 1024
"""Characters at the end of the log that are read."""
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
    """A rank that torchrun's table lists as failed."""

    rank: int
    exit_code: int
    """Negative: the signal that ended it."""
    exception: str | None = None
    """Its exception, where the log holds it."""
    lost_a_peer: bool = False
    """Whether it failed because another rank was gone."""

    @property
    def signal(self) -> int | None:
        return -self.exit_code if self.exit_code < 0 else None


def lost_a_peer(text: str) -> bool:
    """Return whether an error's text says that another rank is gone or cannot be reached."""
    return _PEER_LOST.search(text) is not None


def torchrun_child(log: str) -> Child | None:
    """Return the child that made torchrun fail; None where the log has no table of torchrun's.

    torchrun stops the others with SIGTERM and may notice several failures at once. A child that was stopped, or that
    lost a peer, is therefore returned only where no other child failed.
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


def last_error(log: str) -> str:
    """Return the last exception whose traceback is in the log, else the last line that says anything; "": none does."""
    lines = (line.strip() for line in reversed(log[-MAX_LOG:].splitlines()))
    return last_exception(log) or next((line[:_MAX_EXCEPTION] for line in lines if line), "")


def exception_type(log: str) -> str:
    """Return the type of the log's last exception, without its text; "" where none is recognised."""
    words = last_error(log)
    return words.partition(":")[0] if last_exception(log) or _ERROR.match(words) else ""


def of_torchrun_child(log: str) -> str:
    """Return the log without the lines of other children and without torchrun's own traceback.

    What is left fits into a short message. A log in which torchrun has not failed is returned unchanged.
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
    """Yield the entries of a part of torchrun's table. before: the log up to torchrun's own output."""
    starts = [place for place, line in enumerate(table) if _ENTRY.match(line)]
    for start, end in pairwise([*starts, len(table)]):
        entry = table[start + 1 : end]
        rank, code = _first(_RANK, entry), _first(_EXIT_CODE, entry)
        if rank is not None and code is not None:
            exception = _recorded(entry) or _printed(before, rank) if code > 0 else None
            # The line with the exception's type may be cut off.
            text = exception or "\n".join(line for line in before if _rank_of(line) in (None, rank))
            yield Child(rank, code, exception, code > 0 and lost_a_peer(text))


def _distance(child: Child) -> int:
    """Return how far the child is from the cause: 0 is nearest. Among equals the root cause stands first."""
    return 2 if child.signal == _SIGTERM else int(child.lost_a_peer)


def _recorded(entry: Sequence[str]) -> str | None:
    """Return the exception in the entry itself; it has one where torch's `record` decorates the main function."""
    lines = [line for line in entry if not _RULE.match(line)]
    return _exception([line.strip() if not line.startswith("    ") else line for line in lines])


def _printed(before: Sequence[str], rank: int) -> str | None:
    """Return the exception that the rank has printed; where no line names a rank, the last one in the log."""
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
    # Indented lines below a frame are its source code and markers.
    after = [line for line in lines[last + 1 :] if line]
    place = next((place for place, line in enumerate(after) if not line[0].isspace()), len(after))
    if place == len(after) or not _EXCEPTION.match(after[place]):
        return None
    found = after[place][:_MAX_EXCEPTION].rstrip()
    if not found.endswith(":"):
        return found
    # A heading, as of load_state_dict: the last of the lines that belong to it says what is wrong.
    below = list(takewhile(lambda line: line[0].isspace(), after[place + 1 :]))
    return f"{found} {below[-1].strip()[:_MAX_EXCEPTION]}" if below else found


def _begin_of_own_traceback(lines: Sequence[str], title: int) -> int:
    """Return the index of the first line of the traceback that ends at `title`; `title` where there is none."""
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
