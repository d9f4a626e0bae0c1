"""What the stacks of ranks say: where each is, and which one holds up the others. Text of a pod: hostile."""

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from disttrain_api.bounds import cut
from disttrain_api.errors import LayoutError
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import DataParallelMode
from disttrain_api.spec import JobSpec
from disttrain_api.stacks import MAX_STACK_BYTES, STOPPED, main_thread
from disttrain_operator.decide.collectives import behind
from disttrain_operator.decide.live import Blame
from disttrain_operator.decide.rank_names import ranks_in_words

_MAX_LINE_BYTES = 1200
_CALLS_OF_OTHERS = 3
"""Shown of a rank that waits: the rest is alike on all of them."""
_MOST_CALLS = 8
"""Shown of ranks that wait in different calls, where the innermost are alike."""
_MOST_GROUPS = 4
"""Groups of ranks in the same calls that a sentence has."""
_FRAME = re.compile(r'File "([^"\n]*)", line (\d+) in (\S+)')
_WAITS = re.compile(r"/torch/(distributed/(?!checkpoint/)|autograd/graph\.py|nn/parallel/distributed\.py)|"
                    r"/disttrain_(trainer|session)/(?!data/|checkpoint/|runtime/files\.py)")  # fmt: skip
"""Where the innermost call of a rank is that waits for others: a collective call of C++ has no frame of its own, and
DDP's run in the backward pass. Innermost in a checkpoint's code a rank reads or writes."""
_IN_COLLECTIVE = re.compile(r"/torch/(distributed/|autograd/graph\.py)|/disttrain_trainer/runtime/mesh\.py")
"""The same, where nothing but waiting is done: other calls of the trainer may write to a disk."""
_BACKWARD = re.compile(r"/torch/autograd/graph\.py")
"""A rank whose innermost call is here computes its gradient, or waits for that of others."""
_POINT_TO_POINT = re.compile(r"/torch/distributed/pipelining/|/disttrain_trainer/parallel/pipe(line|dream)/")
_SENDS = frozenset({"send", "recv", "isend", "irecv", "batch_isend_irecv", "recv_object_list", "send_object_list"})
"""Stages of a pipeline wait in different calls as a rule."""
_READS = re.compile(r"/disttrain_trainer/data/|/torch/utils/data/")


class _Call(NamedTuple):
    path: str
    line: str
    name: str


def main_stack(text: str) -> str:
    """Return the calls of the thread that answered, which is the main one, as one line; else the begin of the text."""
    return _one_line(text, _calls(text))


def in_one_group(spec: JobSpec) -> bool:
    """Return whether the collective calls of a step are those of all ranks: no rank may wait in another one."""
    parallelism = spec.parallelism
    if parallelism.data_parallel.mode is not DataParallelMode.ALL_REDUCE:
        return False
    try:
        mesh = Mesh.of(parallelism, spec.world_size)
    except LayoutError:
        return False
    return mesh.pipeline == mesh.expert == 1 and sum(degree > 1 for degree in mesh.degrees) <= 1


def blame_of(stacks: Mapping[int, str], *, whole: bool = True, together: bool = True) -> Blame | None:
    """Return the lowest rank that is stopped, else one that does not answer, else one that computes where others wait
    for it, else those that wait somewhere else than most of the others.

    Where they say nothing for certain, return the lowest rank that is behind the others in the calls of a group of all
    ranks, by torch's flight recorder.

    Where no such rank is to be known, return where the ranks are if that is more than one place, or if all of them read
    data; else None.

    stacks: the text of each rank that was asked. whole: whether these are all ranks of the job. together: as
    `in_one_group` has it; a job of two ranks is always one group.
    """
    calls = {rank: _calls(text) for rank, text in sorted(stacks.items())}
    answer = {rank: found for rank, found in calls.items() if found}
    silent = [rank for rank in calls if rank not in answer]
    stopped = [rank for rank in silent if stacks[rank] == STOPPED]
    if stopped and answer:
        return Blame(stopped[0], f"is stopped by a signal, and {_others(answer, stacks)}", certain=True, awaited=True)
    if silent and answer:
        return Blame(silent[0], f"does not answer, and {_others(answer, stacks)}", awaited=True)
    waiting = {rank: found for rank, found in answer.items() if _WAITS.search(found[0].path)}
    busy = {rank: found for rank, found in answer.items() if rank not in waiting}
    if busy and waiting:
        first, *more = busy
        also = (
            f", {ranks_in_words(more)} {'computes or reads' if len(more) == 1 else 'compute or read'} too"
            if more
            else ""
        )
        return Blame(first, f"is in {main_stack(stacks[first])}{also}, and {_others(waiting, stacks)}", awaited=True)
    if busy:
        read = whole and all(any(_READS.search(call.path) for call in found) for found in busy.values())
        return Blame(None, f"all ranks wait for data, {_where(_alike(busy), ' is in', stacks)}") if read else None
    found = _of_waiting(waiting, stacks, whole=whole, together=together or len(waiting) == 2)
    uncertain = whole and (found is None or (found.rank is None and not found.certain))
    return (_of_recorder(waiting, stacks) or found) if uncertain else found


def _of_recorder(waiting: Mapping[int, list[_Call]], stacks: Mapping[int, str]) -> Blame | None:
    """The rank that has not begun what the others wait in. Not certain: it may be about to."""
    if any(_is_point_to_point(calls) for calls in waiting.values()) or (late := behind(stacks)) is None:
        return None
    first, *same = late.ranks
    also = f", nor have {ranks_in_words(same)}" if len(same) > 1 else f", nor has rank {same[0]}" if same else ""
    wait = f"{ranks_in_words(late.others)} {'waits' if len(late.others) == 1 else 'wait'}"
    return Blame(
        first,
        f"has not begun {late.call.what} in {late.call.of}{also}, and {wait} in it: it is in"
        f" {main_stack(stacks[first])}",
    )


def _of_waiting(
    waiting: Mapping[int, list[_Call]], stacks: Mapping[int, str], *, whole: bool, together: bool
) -> Blame | None:
    """What is known where every rank waits: those outside of a majority in the same calls have gone astray, if all
    ranks should be in the same ones."""
    groups = _alike(waiting)
    if len(groups) < 2:
        return None
    together = together and not any(_is_point_to_point(found) for found in waiting.values())
    most = max(groups, key=len)
    if together and 2 * len(most) > len(waiting) and (whole or len(most) == len(waiting) - 1):
        astray = [group for group in groups if group is not most]
        first, *same = astray[0]
        also = f", as {ranks_in_words(same)}" if same else ""
        also += f", {_where(astray[1:], ' is in', stacks)}" if len(astray) > 1 else ""
        others = {rank: waiting[rank] for rank in most}
        certain = all(_IN_COLLECTIVE.search(found[0].path) for found in waiting.values())
        return Blame(first, f"is in {main_stack(stacks[first])}{also}, and {_others(others, stacks)}", certain)
    certain = together and whole and all(
        _IN_COLLECTIVE.search(found[0].path) and not _BACKWARD.search(found[0].path) for found in waiting.values()
    )  # fmt: skip
    return Blame(None, _where(groups, " waits in", stacks) + (": they wait for each other" if certain else ""), certain)


def _alike(calls: Mapping[int, list[_Call]]) -> list[list[int]]:
    """The ranks in groups that are in the same calls, by the lowest rank of each."""
    found: dict[tuple[tuple[str, str], ...], list[int]] = defaultdict(list)
    for rank, of_rank in calls.items():
        found[tuple((call.path, call.name) for call in of_rank)].append(rank)
    return list(found.values())


def _is_point_to_point(calls: list[_Call]) -> bool:
    innermost = calls[:_CALLS_OF_OTHERS]
    return any(call.name in _SENDS or _POINT_TO_POINT.search(call.path) for call in innermost)


def _where(groups: list[list[int]], verb: str, stacks: Mapping[int, str]) -> str:
    """Where some groups of ranks are, as far as it takes to see that they are in different calls."""
    shown = groups[:_MOST_GROUPS]
    calls = [_calls(stacks[group[0]]) for group in shown]
    depth = _CALLS_OF_OTHERS
    while depth < _MOST_CALLS and len({_one_line("", found[:depth]) for found in calls}) < len(calls):
        depth += 1
    sentences = []
    for group, found in zip(shown, calls, strict=True):
        # The innermost call of one that computes its gradient may be no waiting.
        does = " is in" if _BACKWARD.search(found[0].path) else verb
        does = does if len(group) == 1 else {" is in": " are in", " waits in": " wait in"}[does]
        sentences.append(f"{ranks_in_words(group)}{does} {_one_line('', found[:depth])}")
    left = sum(len(group) for group in groups[_MOST_GROUPS:])
    if left:
        sentences.append(f"{left} more elsewhere")
    return f"{', '.join(sentences[:-1])}, and {sentences[-1]}" if len(sentences) > 1 else sentences[0]


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
