"""What the stacks of ranks say: where each is, and which one holds up the others. Text of a pod: hostile."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from disttrain_api.bounds import cut
from disttrain_api.report import MAX_STACK_BYTES, STOPPED, main_thread
from disttrain_operator.decide.observed import Blame

_MAX_LINE_BYTES = 1200
_CALLS_OF_OTHERS = 3
"""Shown of a rank that waits: the rest is alike on all of them."""
_FRAME = re.compile(r'File "([^"\n]*)", line (\d+) in (\S+)')
_WAITS = re.compile(r"/torch/(distributed/|autograd/graph\.py)|/disttrain_(trainer|session)/(?!data/)")
"""Where the innermost call of a rank is that waits for others: a collective call of C++ has no frame of its own, and
DDP's run in the backward pass."""


_IN_COLLECTIVE = re.compile(r"/torch/(distributed/|autograd/graph\.py)|/disttrain_trainer/runtime/mesh\.py")
"""The same, where nothing but waiting is done: other calls of the trainer may write to a disk."""


class _Call(NamedTuple):
    path: str
    line: str
    name: str


def main_stack(text: str) -> str:
    """Return the calls of the thread that answered, which is the main one, as one line; else the begin of the text."""
    return _one_line(text, _calls(text))


def blame_of(stacks: Mapping[int, str]) -> Blame | None:
    """Return the lowest rank that is stopped, else one that does not answer, else one that computes where others wait
    for it, else the only one that waits somewhere else than the others; None if there is no such rank.

    stacks: the text of each rank that was asked.
    """
    calls = {rank: _calls(text) for rank, text in sorted(stacks.items())}
    answer = {rank: found for rank, found in calls.items() if found}
    silent = [rank for rank in calls if rank not in answer]
    stopped = [rank for rank in silent if stacks[rank] == STOPPED]
    if stopped and answer:
        return Blame(stopped[0], f"is stopped by a signal, and {_others(answer, stacks)}", certain=True)
    if silent and answer:
        return Blame(silent[0], f"does not answer, and {_others(answer, stacks)}")
    waiting = {rank: found for rank, found in answer.items() if _WAITS.search(found[0].path)}
    busy = [rank for rank in answer if rank not in waiting]
    if busy and waiting:
        return Blame(busy[0], f"is in {main_stack(stacks[busy[0]])}, and {_others(waiting, stacks)}")
    alike: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for rank, found in waiting.items():
        alike[tuple((call.path, call.name) for call in found)].append(rank)
    alone = [ranks[0] for ranks in alike.values() if len(ranks) == 1]
    if len(alone) != 1 or len(waiting) < 3:
        return None
    others = {rank: found for rank, found in waiting.items() if rank != alone[0]}
    certain = all(_IN_COLLECTIVE.search(found[0].path) for found in waiting.values())
    return Blame(alone[0], f"is in {main_stack(stacks[alone[0]])}, and {_others(others, stacks)}", certain)


def wait_for_others(stacks: Mapping[int, str]) -> bool:
    """Return whether all of these ranks answer, and wait for others."""
    found = [_calls(text) for text in stacks.values()]
    return bool(found) and all(calls and _WAITS.search(calls[0].path) for calls in found)


def _others(calls: Mapping[int, list[_Call]], stacks: Mapping[int, str]) -> str:
    first = next(iter(calls))
    where = _one_line(stacks[first], calls[first][:_CALLS_OF_OTHERS])
    return f"{len(calls)} others wait, rank {first} in {where}" if len(calls) > 1 else f"rank {first} waits in {where}"


def _calls(text: str) -> list[_Call]:
    """The calls of the thread that answered, the innermost first; none where it did not."""
    return [_Call(*found) for found in _FRAME.findall(main_thread(text, ranks=1))]


def _one_line(text: str, calls: list[_Call]) -> str:
    shown = " < ".join(f"{call.name} ({call.path.rpartition('/')[2]}:{call.line})" for call in calls)
    line = shown or " ".join(text[:MAX_STACK_BYTES].split())
    return cut("".join(letter if letter.isprintable() else "?" for letter in line), _MAX_LINE_BYTES)
