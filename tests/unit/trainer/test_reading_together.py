"""Samples that a data set reads together are the same, and as many, as if each was read by itself."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from disttrain_api.batch import Batch
from disttrain_api.corpus import CorpusConfig
from disttrain_api.training import Training
from disttrain_trainer.data import corpus
from disttrain_trainer.data.ahead import MOST_BYTES, ReadAhead, ahead_of
from disttrain_trainer.data.batches import Datasets, Microbatch, read_microbatch, read_microbatches
from disttrain_trainer.data.sampler import Cursor, Sampler, Slots
from disttrain_trainer.losses import weight_of
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.tasks.supervised import Supervised
from tests.corpora import prepared

MOST_CALLS = 55
"""Calls of functions for a microbatch, at most."""
MOST_CALLS_TOGETHER = 40
"""The same for each of eight that are read at once."""
TASK = Supervised(Training.model_validate({"model": {"name": "gpt"}, "data": {"name": "text"}, "steps": 1}))


def loaded(folder: Path, **fields: object) -> Datasets:
    return corpus.load(CorpusConfig(**{"path": str(folder), "sequence_length": 16, **fields}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Several shards of several documents each."""
    return prepared(tmp_path_factory.mktemp("corpus"), part_bytes=10_000, end_of_document="0")


def slots_of(microbatches: int, micro: int) -> list[Slots]:
    indices = np.arange(microbatches * micro).reshape(microbatches, micro)
    return [Slots(one, np.ones(micro, np.float32)) for one in indices]


def stacking(*, pads: bool = True) -> SimpleNamespace:
    """A task's way to make batches of numbers."""

    def collate(samples, indices):
        return torch.stack(list(samples))

    return SimpleNamespace(pads=pads, collate=collate, weight=lambda batch, weights: 1.0)


def calls_in(work: Callable[[], object]) -> int:
    """Calls of functions while it works."""
    calls: list[str] = []
    sys.setprofile(lambda _, event, __: calls.append(event) if event in ("call", "c_call") else None)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(calls)


def test_each_token_of_what_is_no_padding_counts(folder):
    slots = Slots(np.array([3, 4, 0]), np.array([1, 1, 0], np.float32))
    found = read_microbatch(TASK, loaded(folder).training, slots)
    assert (found.weight, found.samples) == (2 * 16, 2)
    assert weight_of(found.targets, found.weights) == found.weight


def test_microbatches_of_one_sequence_take_few_calls(folder):
    """Beside a microbatch of one, each call of Python costs a percent."""
    training, slots = loaded(folder).training, slots_of(8, 1)
    list(read_microbatches(TASK, training, slots))
    assert 10 < calls_in(lambda: read_microbatch(TASK, training, slots[0])) <= MOST_CALLS
    assert 10 < calls_in(lambda: list(read_microbatches(TASK, training, slots))) / 8 <= MOST_CALLS_TOGETHER


@pytest.mark.parametrize("fields", [{}, {"document_mask": True}, {"mixed": True}], ids=str)
@pytest.mark.parametrize(("microbatches", "micro"), [(1, 2), (5, 1), (3, 30)])
def test_microbatches_of_a_step_are_what_each_is_by_itself(folder, fields, microbatches, micro):
    if "mixed" in fields:
        fields = {"path": None, "mixture": [{"path": str(folder)}, {"path": str(folder), "weight": 2.0}]}
    training, slots = loaded(folder, **fields).training, slots_of(microbatches, micro)
    slots[-1].weights[-1] = 0
    expected = [read_microbatch(TASK, training, one) for one in slots]
    found = list(read_microbatches(TASK, training, slots))
    assert len({tuple(one.inputs.flatten().tolist()) for one in found}) == microbatches
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert (one.starts is None) == (other.starts is None) == ("document_mask" not in fields)
        if one.starts is not None:
            assert torch.equal(one.starts, other.starts)
        assert (one.weights.tolist(), one.weight, one.samples) == (other.weights.tolist(), other.weight, other.samples)


@pytest.mark.parametrize(
    ("microbatches", "micro", "seeds", "pads", "reads"),
    [
        (5, 3, (), True, [15]),
        (150, 1, (), True, [128, 22]),
        (3, 65, (), True, [65, 65, 65]),
        (0, 1, (), True, []),
        (3, 1, (7,), True, [1, 1, 1]),
        (2, 2, (), False, [2, 1]),
    ],
    ids=["all at once", "parts of a long step", "large ones", "none", "each draws by itself", "each is cut by itself"],
)
def test_which_microbatches_are_read_at_once(microbatches, micro, seeds, pads, reads):
    """Memory is bounded, and what a sample draws is a function of its own microbatch."""
    found: list[int] = []

    class Counted(Numbers):
        def __getitems__(self, indices):
            found.append(len(indices))
            return super().__getitems__(indices)

    slots = [Slots(one.indices, one.weights, seeds) for one in slots_of(microbatches, micro)]
    if not pads:
        slots[-1].weights[-1] = 0
    read = list(read_microbatches(stacking(pads=pads), Counted(), slots))
    assert found == reads
    assert [one.batch.tolist() for one in read] == [one.indices[one.weights > 0].tolist() for one in slots]


def test_samples_read_together_are_as_many_as_were_asked_for():
    class Short:
        def __len__(self):
            return 9

        def __getitem__(self, index):
            raise AssertionError("they are read together")

        def __getitems__(self, indices):
            return [(torch.zeros(2), 0) for _ in indices][1:]

    slots = Slots(np.arange(3), np.ones(3, np.float32))
    with pytest.raises(InvalidConfiguration, match="`__getitems__` gave 2 samples for 3 numbers"):
        read_microbatch(TASK, Short(), slots)


class Numbers:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        return torch.tensor(index)

    def __getitems__(self, indices):
        return [torch.tensor(index) for index in indices]


class Doubled(Numbers):
    def __getitem__(self, index):
        return 2 * super().__getitem__(index)


class Wrapped:
    inner = Numbers()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __getitem__(self, index):
        return 2 * self.inner[index]


CPU = torch.device("cpu")


def a_sampler(size: int = 50, micro: int = 2, passes: int = 3, draws: bool = False) -> Sampler:
    """That of two replicas, whose epochs end amid a step."""
    batch = Batch(micro=micro, accumulation=passes, world=2 * micro * passes)
    return Sampler(size=size, seed=3, batch=batch, replicas=2, draws=draws)


def the_numbers(microbatches: list[Microbatch]) -> list[list[float]]:
    return [[*one.batch.tolist(), *one.weights.tolist()] for one in microbatches]


def test_steps_that_are_read_ahead_are_what_each_is_by_itself():
    """Also where an epoch ends among them, and where a checkpoint goes on elsewhere."""
    sampler, batching, data = a_sampler(), stacking(), Numbers()
    ahead = ahead_of(batching, data, sampler, 1)
    cursors = [Cursor()]
    while len(cursors) < 30:
        cursors.append(sampler.advance(cursors[-1]))
    assert cursors[-1].epoch > 1
    for cursor in (*cursors, *cursors[4:9], *cursors[12:29:3]):
        expected = list(read_microbatches(batching, data, sampler.microbatches(cursor, 1)))
        assert the_numbers(ahead.load(cursor, CPU)) == the_numbers(expected)


def test_many_small_steps_are_one_reading():
    reads: list[int] = []

    class Counted(Numbers):
        def __getitems__(self, indices):
            reads.append(len(indices))
            return super().__getitems__(indices)

    sampler = a_sampler(size=200, micro=1, passes=2)
    ahead, cursor = ahead_of(stacking(), Counted(), sampler, 0), Cursor()
    for _ in range(40):
        ahead.load(cursor, CPU)
        cursor = sampler.advance(cursor)
    # The first step tells how large one is.
    assert reads == [2, 128]


def test_large_samples_are_read_step_by_step():
    """Memory is bounded, however long a sequence is."""
    reads: list[int] = []

    class Large(Numbers):
        def __getitems__(self, indices):
            reads.append(len(indices))
            return [torch.zeros(MOST_BYTES // 24)] * len(indices)

    sampler = a_sampler(size=200, micro=1, passes=2)
    ahead, cursor = ahead_of(stacking(), Large(), sampler, 0), Cursor()
    for _ in range(6):
        ahead.load(cursor, CPU)
        cursor = sampler.advance(cursor)
    # A step is a third of that.
    assert reads == [2, 6, 6]


def test_a_step_that_cannot_be_read_ends_no_step_before_it():
    sampler = a_sampler(size=200, micro=1, passes=2)
    cursors = [Cursor(0, position) for position in range(0, 80, 4)]
    broken = int(sampler.microbatches(cursors[5], 0)[1].indices[0])

    class Broken(Numbers):
        def __getitems__(self, indices):
            if broken in indices:
                raise OSError("a damaged sector")
            return super().__getitems__(indices)

    ahead = ahead_of(stacking(), Broken(), sampler, 0)
    for cursor in cursors[:5]:
        assert len(ahead.load(cursor, CPU)) == 2
    with pytest.raises(OSError, match="a damaged sector"):
        ahead.load(cursors[5], CPU)


@pytest.mark.parametrize(
    ("sampler", "pads", "data", "ahead"),
    [
        ({}, True, Numbers, True),
        ({"micro": 16, "passes": 4}, True, Numbers, True),
        ({"micro": 16, "passes": 5}, True, Numbers, False),
        ({"draws": True}, True, Numbers, False),
        ({}, False, Numbers, False),
        ({}, True, Doubled, False),
    ],
    ids=["small", "two steps at once", "large", "draws", "is cut", "sample by sample"],
)
def test_what_is_read_ahead(sampler, pads, data, ahead):
    found = ahead_of(stacking(pads=pads), data(), a_sampler(**sampler), 0)
    assert isinstance(found, ReadAhead) is ahead


@pytest.mark.parametrize("kind", [Doubled, Wrapped])
def test_what_a_data_set_does_with_a_sample_is_not_passed_by(kind):
    """Red where samples that are read together come from a class or an object below."""
    (found,) = read_microbatches(stacking(), kind(), slots_of(1, 3))
    assert found.batch.tolist() == [0, 2, 4]
