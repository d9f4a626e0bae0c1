"""Which samples a step uses: a pure function of (seed, epoch, position), whatever the number of ranks.

An epoch is a permutation of all samples. A global batch takes the next positions of it; the last one of an epoch is
short and filled up with samples of weight 0. The cursor (epoch, position) is all that a checkpoint needs.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from disttrain_api.batch import Batch

_ROUNDS = 6
_DRAWN_AT_ONCE = 4096
"""Samples of a replica, about: to draw so many takes hardly longer than to draw those of one step."""
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Cursor:
    """Position in the data: `position` samples of `epoch` are consumed."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True)
class Slots:
    """Samples of one microbatch. `weights` is 1 for a sample and 0 for padding; both are [micro batch size]."""

    indices: NDArray[np.int64]
    weights: NDArray[np.float32]
    seeds: tuple[int, ...] = ()
    """They seed what data may draw while they are read; empty where they draw nothing."""


@dataclass(frozen=True)
class Sampler:
    """Cuts epochs of `size` samples into global batches, and those into microbatches of each replica.

    What is drawn for a microbatch is a function of its place, too: all ranks that share it draw the same, in any
    layout, in any process, and again after a resume.
    """

    size: int
    seed: int
    batch: Batch
    replicas: int
    draws: bool = True
    """Whether samples may be drawn at random while they are read, as augmentation is."""

    def microbatches(self, cursor: Cursor, replica: int) -> list[Slots]:
        """The microbatches of one replica in the global batch at `cursor`, in order.

        The global batch is cut into slots of the micro batch size; slot m x replicas + r is microbatch m of replica r.
        """
        micro, passes = self.batch.micro, self.batch.passes
        weights = np.ones((passes, micro), np.float32)
        if cursor.position + self.batch.world > self.size:
            starts = cursor.position + self._slots(replica)
            weights[starts[:, None] + np.arange(micro) >= self.size] = 0
        step, first = divmod(cursor.position, self.batch.world)
        steps = max(1, _DRAWN_AT_ONCE // weights.size)
        indices = _drawn(self, cursor.epoch, replica, first, step // steps, steps)[step % steps].copy()
        if not self.draws:
            return list(map(Slots, indices, weights))
        seeds = [(self.seed, cursor.epoch, cursor.position + int(slot)) for slot in self._slots(replica)]
        return list(map(Slots, indices, weights, seeds))

    def drawn(self, epoch: int, replica: int, begins: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples of one replica in the global batches at these positions: [batches, microbatches, micro]."""
        positions = begins[:, None, None] + self._slots(replica)[:, None] + np.arange(self.batch.micro)
        # Padding repeats the first sample of the batch, which is always there.
        return permute(np.where(positions < self.size, positions, begins[:, None, None]), self.size, self.seed, epoch)

    def _slots(self, replica: int) -> NDArray[np.int64]:
        """Where a replica's microbatches begin in a global batch."""
        return self.batch.micro * np.arange(replica, self.batch.passes * self.replicas, self.replicas)

    def advance(self, cursor: Cursor) -> Cursor:
        """The cursor after the global batch at `cursor`."""
        position = cursor.position + self.batch.world
        return Cursor(cursor.epoch + 1, 0) if position >= self.size else Cursor(cursor.epoch, position)


@lru_cache(maxsize=16)
def _drawn(sampler: Sampler, epoch: int, replica: int, first: int, part: int, steps: int) -> NDArray[np.int64]:
    """The samples of one replica in the `part`-th so many steps of an epoch, the first of which begins at `first`."""
    begins = first + sampler.batch.world * np.arange(part * steps, (part + 1) * steps)
    return sampler.drawn(epoch, replica, begins[begins < sampler.size])


def permute(positions: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Sample at each position (0 <= position < size) of the epoch's permutation; no memory grows with `size`.

    A Feistel network permutes 0..4^k - 1 >= size; what falls outside is permuted again until it falls inside
    (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Written out here so that neither
    NumPy nor torch can change the order of a run that is resumed under another version.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    values = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half: np.uint64, keys: tuple[int, ...]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << half) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on arrays; uint64 wraps around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    return tuple(_mix_int(_mix_int(_mix_int(seed) ^ epoch) ^ turn) for turn in range(_ROUNDS))


def _mix_int(value: int) -> int:
    """One step of SplitMix64 from the state `value`."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
