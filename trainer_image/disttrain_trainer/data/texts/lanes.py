"""An endless stream of samples that is the same for every number of replicas, and begins anywhere.

There are as many blocks as lanes at least; for fewer see whole.py. The blocks of all passes are one sequence, each pass
a permutation of them. Block i belongs to lane i mod LANES. A lane reads its blocks one after the other, its texts
become one row of tokens, and its samples are cut from that. Sample n is the next one of lane n mod LANES. Replica r of
R has the lanes that are r modulo R, which are its samples of each batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from disttrain_api.lines import MAX_REPLICAS
from disttrain_trainer.data.sampler import permute
from disttrain_trainer.runtime.errors import InvalidConfiguration

LANES = MAX_REPLICAS
Tokens = NDArray[np.int32]


class Place(NamedTuple):
    """Where the next sample of a lane begins."""

    block: int = 0
    """So many blocks of the lane were read."""
    text: int = 0
    """In the block."""
    token: int = 0
    """In the text."""


class Lanes:
    """An iterable data set (protocols.IterableDataset) of (input, target), both [T], int64."""

    def __init__(
        self, read: Callable[[int], list[Tokens]], blocks: int, length: int, seed: int, own: range | None = None
    ) -> None:
        """read: gives the tokens of each text of a block; own: the lanes; None: all."""
        self._read, self._blocks, self._length, self._seed = read, blocks, length, seed
        self._own = range(LANES) if own is None else own
        self._next = 0
        self._lanes = [_Lane(self._read_of(lane), Place()) for lane in self._own]

    def shard(self, index: int, count: int) -> Lanes:
        """Return the part of a replica. Raises InvalidConfiguration for a number of replicas that cannot share."""
        if len(self._own) % count:
            raise InvalidConfiguration(
                f"`training.data.name` lines is shared by a number of replicas that divides {len(self._own)}, found "
                f"{count}: change `workers.replicas`, or prepare a corpus (`disttrain data prepare`)"
            )
        return Lanes(self._read, self._blocks, self._length, self._seed, self._own[index::count])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            lane = self._lanes[self._next]
            self._next = (self._next + 1) % len(self._lanes)
            yield sample_of(lane.take(self._length + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "places": torch.tensor([lane.place for lane in self._lanes])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = state["next"]
        places = state["places"].tolist()
        self._lanes = [_Lane(self._read_of(lane), Place(*place)) for lane, place in zip(self._own, places, strict=True)]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go to the position at which `states`, of another number of replicas, have read as many samples together."""
        places = {
            lane: Place(*place)
            for replica, state in enumerate(states)
            for lane, place in zip(range(replica, LANES, len(states)), state["places"].tolist(), strict=True)
        }
        # All replicas have read as many, and those that divide the lanes divide what was read of them.
        self._next = states[0]["next"] * len(states) // (LANES // len(self._own))
        self._lanes = [_Lane(self._read_of(lane), places[lane]) for lane in self._own]

    def _read_of(self, lane: int) -> Callable[[int], list[Tokens]]:
        def read(number: int) -> list[Tokens]:
            once, place = divmod(number * LANES + lane, self._blocks)
            return self._read(int(permute(np.array([place]), self._blocks, self._seed, once)[0]))

        return read


class _Lane:
    """A row of tokens without end."""

    def __init__(self, read: Callable[[int], list[Tokens]], place: Place) -> None:
        """read: gives the tokens of each text of the lane's block of a number."""
        self._read, self.place = read, place
        self._texts: deque[tuple[Place, Tokens]] = deque()
        self._next_block = place.block

    def take(self, count: int) -> Tokens:
        """Return the next `count` tokens, of which the last one will be the first of the next ones."""
        while sum(len(tokens) for _, tokens in self._texts) < count:
            self._add_block()
        found = np.concatenate([tokens for _, tokens in self._texts])[:count]
        self._leave(count - 1)
        return found

    def _add_block(self) -> None:
        block, begin = self._next_block, self.place
        self._next_block += 1
        for number, tokens in enumerate(self._read(block)):
            # After a resume the first block was read in part.
            at = Place(block, number, begin.token if begin[:2] == (block, number) else 0)
            if at >= begin and at.token < len(tokens):
                self._texts.append((at, tokens[at.token :]))

    def _leave(self, count: int) -> None:
        """Go on behind so many tokens."""
        while count:
            place, tokens = self._texts.popleft()
            if len(tokens) > count:
                self._texts.appendleft((place._replace(token=place.token + count), tokens[count:]))
                break
            count -= len(tokens)
        self.place = self._texts[0][0]


def sample_of(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return T + 1 tokens as input and target."""
    whole = torch.from_numpy(tokens.astype(np.int64))
    return whole[:-1], whole[1:]


def cut(texts: Iterator[Tokens], length: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return the first `count` samples of texts in a row; fewer where these end before."""
    found: list[tuple[Tensor, Tensor]] = []
    rest = np.empty(0, np.int32)
    for tokens in texts:
        rest = np.concatenate([rest, tokens])
        while len(rest) > length and len(found) < count:
            found.append(sample_of(rest[: length + 1]))
            rest = rest[length:]
        if len(found) == count:
            break
    return list(islice(found, count))
