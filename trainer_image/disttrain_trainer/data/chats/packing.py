"""Which conversations share a sequence: a function of their lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

from disttrain_trainer.data.sampler import permute


def best_fit_decreasing(lengths: NDArray[np.int64], most: int) -> list[list[int]]:
    """Return packs of numbers of lengths; the lengths of each add up to `most` or less, which none exceeds.

    The longest comes first, each into the pack where it leaves the least room: at most 11/9 of the least possible
    number of packs, and four more (Johnson et al. 1974).
    """
    # Neighbours in a file are often alike: those of equal length are drawn.
    drawn = permute(np.arange(len(lengths)), len(lengths), 0, 0)
    packs: list[list[int]] = []
    # Packs by the room that is left in them, and the rooms that there are, in order.
    with_room: dict[int, list[list[int]]] = {}
    rooms: list[int] = []
    for number in drawn[np.argsort(-lengths[drawn], kind="stable")].tolist():
        length = int(lengths[number])
        at = bisect_left(rooms, length)
        if at == len(rooms):
            room = most
            packs.append(pack := [])
        else:
            room = rooms[at]
            pack = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        pack.append(number)
        same = with_room.setdefault(room - length, [])
        if not same:
            insort(rooms, room - length)
        same.append(pack)
    return packs
