"""Seeds and random states, and what this trainer promises about equal runs.

Determinism. On CPUs two runs of one manifest with the same layout, thread count, versions and kind of machine are equal
bit for bit, also when one of them was stopped and resumed:
- parameters: initialised from `seed` alone, alike on every rank and in every layout;
- data order: a pure function of (seed, epoch, position), see data/sampler.py, and so is what samples draw;
- dropout and the like: each rank draws from its own stream, from (seed, rank), kept in the checkpoint; with dropout,
  layouts therefore differ in their noise, and runs do where copies on the logical devices of one CPU share a stream;
- sums of gradients: DDP's buckets keep one order from the first step on, see parallel/data_parallel.py.
Another number of ranks or threads adds the same numbers in another order: equal up to rounding.
On GPUs several kernels add with atomics, so runs differ in the last bits there; nothing is promised.
"""

import random
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from disttrain_trainer.runtime.device import gpu_random_state, restore_gpu_random_state


def seed_everything(*seeds: int) -> None:
    """Seed Python, NumPy and torch (all devices) from a tuple of numbers, well mixed."""
    torch.manual_seed(_seed_host(seeds))


def _seed_host(seeds: tuple[int, ...]) -> int:
    """Seed what draws on the host; return torch's seed."""
    words = np.random.SeedSequence(seeds).generate_state(2)
    random.seed(int(words[0]))
    np.random.seed(int(words[0]))
    seed = int(words[0]) << 32 | int(words[1])
    torch.default_generator.manual_seed(seed)
    return seed


def random_state() -> dict[str, Any]:
    """All random states of this process."""
    return _host_state() | gpu_random_state()


def _host_state() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restore the random state afterwards: reading samples may draw random numbers."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


@contextmanager
def drawing_from(seeds: tuple[int, ...]) -> Iterator[None]:
    """Draw on the host from a stream of its own inside, that of `seeds`; without any, as outside.

    GPUs are left alone: a process that reads data was forked, and cannot use the driver.
    """
    if not seeds:
        yield
        return
    state = _host_state()
    _seed_host(seeds)
    try:
        yield
    finally:
        restore_random_state(state)


def restore_random_state(state: dict[str, Any]) -> None:
    """The opposite of `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    restore_gpu_random_state(state)


_NUMPY_IN_CHECKPOINT = "numpy_generator"


def saved_random_state() -> dict[str, Any]:
    """Return all random states of this process as a checkpoint holds them: plain values and tensors, no arrays."""
    state = random_state()
    name, keys, *rest = state.pop("numpy")
    return state | {_NUMPY_IN_CHECKPOINT: [name, keys.tolist(), *rest]}


def restore_saved_random_state(state: dict[str, Any]) -> None:
    """Restore what `saved_random_state` returned. Raises TypeError or ValueError for anything else.

    A checkpoint of an earlier version holds NumPy's state as an array, which is not read: it stays as it is.
    """
    name, keys, *rest = state.get(_NUMPY_IN_CHECKPOINT) or saved_random_state()[_NUMPY_IN_CHECKPOINT]
    restore_random_state({**state, "numpy": (name, np.array(keys, dtype=np.uint32), *rest)})


_PYTHON_WORDS, _NUMPY_WORDS = 625, 624
_PYTHON_VERSION, _NUMPY_NAME = 3, "MT19937"
_REST = struct.Struct("<?dqqd")


def packed_random_state() -> bytes:
    """Return the random states of the host as a few thousand bytes, in the time that a step has for it."""
    _, words, gauss = random.getstate()
    _, keys, *rest = np.random.get_state()
    # An array of numpy's takes three times as long to make of a tuple.
    parts = (array("I", words), np.asarray(keys), torch.get_rng_state().numpy())
    return _REST.pack(gauss is not None, gauss or 0.0, *rest) + b"".join(part.tobytes() for part in parts)


def restore_packed_random_state(data: bytes) -> None:
    """Restore what `packed_random_state` returned."""
    has_gauss, gauss, *rest = _REST.unpack_from(data)
    words = np.frombuffer(data, dtype=np.uint32, count=_PYTHON_WORDS + _NUMPY_WORDS, offset=_REST.size)
    restore_random_state(
        {
            "python": (_PYTHON_VERSION, tuple(words[:_PYTHON_WORDS].tolist()), gauss if has_gauss else None),
            "numpy": (_NUMPY_NAME, words[_PYTHON_WORDS:].copy(), *rest),
            "torch": torch.frombuffer(bytearray(data[_REST.size + words.nbytes :]), dtype=torch.uint8),
        }
    )
