"""What the last collective calls of ranks say: where each group is, and who is behind. Text of a pod: hostile."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from disttrain_api.flight_recorder import Collective, Counted, collectives_below
from disttrain_operator.decide.rank_names import ranks_in_words

_MOST_GROUPS, _MOST_PLACES = 2, 4
"""Groups that a sentence has, and places in each where ranks are."""


class Behind(NamedTuple):
    """Ranks that have not begun a call in which all others wait."""

    ranks: list[int]
    call: Collective
    """The call of the others."""
    others: list[int]


def where_groups_are(stacks: Mapping[int, str]) -> str:
    """Return where the ranks are in the calls of their groups, if a call of theirs is not done; else ""."""
    sentences = []
    for calls in _by_group(stacks).values():
        places: dict[Collective, list[int]] = defaultdict(list)
        for rank, of_rank in calls.items():
            places[_place(of_rank)].append(rank)
        if not any(place.pending for place in places):
            continue
        listed = [
            f"{ranks_in_words(ranks)} {_does(ranks, place)} {place.what}"
            for place, ranks in sorted(places.items(), key=lambda one: (-one[0].number, one[1]))[:_MOST_PLACES]
        ]
        sentences.append(f"in {next(iter(places)).of} {', '.join(listed)}")
    found = "; ".join(sentences[-_MOST_GROUPS:])
    return f"by torch's flight recorder {found}" if found else ""


def behind(stacks: Mapping[int, str]) -> Behind | None:
    """Return the ranks of a minority, or one of two, that have begun fewer calls of a group of all ranks than the
    others, which wait in a later one; None where there are none, or the ranks' other groups say otherwise: one that
    waits for a rank in a smaller group may be the victim.

    stacks: of all ranks of the job.
    """
    found: dict[int, Behind] = {}
    ahead: set[int] = set()
    for (_, _, transfer), calls in _by_group(stacks).items():
        if transfer or len(calls) < len(stacks):
            ahead.update(rank for rank, of_rank in calls.items() if _place(of_rank).pending)
            continue
        last = {rank: max(call.number for call in of_rank) for rank, of_rank in calls.items()}
        late = [rank for rank in calls if last[rank] < max(last.values())]
        others = [rank for rank in calls if rank not in late]
        waits = [_place(calls[rank]) for rank in others]
        if not late:
            ahead.update(rank for rank in calls if _place(calls[rank]).pending)
            continue
        if not all(call.pending and call.number > max(last[rank] for rank in late) for call in waits):
            return None
        ahead.update(others)
        found.update((rank, Behind(late, waits[0], others)) for rank in late)
    if not found or ahead & found.keys() or not (2 * len(found) < len(stacks) or len(stacks) == 2):
        return None
    return found[min(found)]


def _by_group(stacks: Mapping[int, str]) -> dict[Counted, dict[int, list[Collective]]]:
    """The calls of each group, by the rank."""
    groups: dict[Counted, dict[int, list[Collective]]] = defaultdict(dict)
    for rank, text in sorted(stacks.items()):
        for call in collectives_below(text):
            groups[call.counted].setdefault(rank, []).append(call)
    return groups


def _place(calls: Iterable[Collective]) -> Collective:
    """The first call that a rank waits in, else its last one."""
    listed = list(calls)
    return next((call for call in listed if call.pending), listed[-1])


def _does(ranks: list[int], place: Collective) -> str:
    if not place.pending:
        return "has done" if len(ranks) == 1 else "have done"
    return "waits in" if len(ranks) == 1 else "wait in"
