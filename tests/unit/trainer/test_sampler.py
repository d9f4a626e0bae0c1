"""The data order: a pure function of (seed, epoch, position), whatever the layout."""

from itertools import chain, repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.batch import Batch
from disttrain_trainer.data import sampler as drawing
from disttrain_trainer.data.batches import share_of
from disttrain_trainer.data.sampler import Cursor, Sampler, permute

untimed = settings(deadline=None)
GOLDEN = [2, 0, 7, 8, 1, 3, 4, 5, 6, 9]

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**31 - 1)
epochs = st.integers(0, 1000)
layouts = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


def sampler(size: int, seed: int, layout: tuple[int, int, int]) -> Sampler:
    micro, accumulation, replicas = layout
    return Sampler(size, seed, Batch(micro, accumulation, micro * accumulation * replicas), replicas)


def global_batch(order: Sampler, cursor: Cursor) -> list[int]:
    """Samples of all replicas and microbatches that are not padding, in order of their slots."""
    per_replica = [order.microbatches(cursor, replica) for replica in range(order.replicas)]
    slots = chain.from_iterable(zip(*per_replica, strict=True))
    return [int(index) for slot in slots for index, weight in zip(slot.indices, slot.weights, strict=True) if weight]


def epoch_of(order: Sampler, epoch: int) -> list[int]:
    cursor, seen = Cursor(epoch), []
    while cursor.epoch == epoch:
        seen += global_batch(order, cursor)
        cursor = order.advance(cursor)
    assert cursor == Cursor(epoch + 1, 0)
    return seen


@untimed
@given(sizes, seeds, epochs)
def test_an_epoch_is_a_permutation(size, seed, epoch):
    assert sorted(permute(np.arange(size), size, seed, epoch)) == list(range(size))


@untimed
@given(sizes, seeds, epochs)
def test_a_position_does_not_depend_on_which_others_are_asked_for(size, seed, epoch):
    together = permute(np.arange(size), size, seed, epoch)
    alone = [permute(np.array([position]), size, seed, epoch)[0] for position in range(min(size, 20))]
    assert list(together[:20]) == alone


@untimed
@given(sizes, seeds, epochs, layouts)
def test_an_epoch_uses_each_sample_once_in_every_layout(size, seed, epoch, layout):
    assert epoch_of(sampler(size, seed, layout), epoch) == list(permute(np.arange(size), size, seed, epoch))


@untimed
@given(sizes, seeds, epochs, layouts, layouts, st.integers(0, 10))
def test_another_layout_and_batch_go_on_in_the_midst_of_an_epoch(size, seed, epoch, first, second, steps):
    orders = chain(repeat(sampler(size, seed, first), steps), repeat(sampler(size, seed, second)))
    cursor, seen = Cursor(epoch), []
    while cursor.epoch == epoch:
        order = next(orders)
        seen += global_batch(order, cursor)
        cursor = order.advance(cursor)
    assert seen == list(permute(np.arange(size), size, seed, epoch))


@untimed
@given(sizes, seeds, layouts)
def test_layouts_with_the_same_global_batch_see_the_same_batches(size, seed, layout):
    micro, accumulation, replicas = layout
    own = sampler(size, seed, layout)
    alone = sampler(size, seed, (micro * accumulation * replicas, 1, 1))
    cursor = Cursor()
    for _ in range(5):
        assert global_batch(own, cursor) == global_batch(alone, cursor)
        assert own.advance(cursor) == alone.advance(cursor)
        cursor = own.advance(cursor)


@untimed
@given(sizes, seeds, layouts)
def test_every_microbatch_is_full_and_padding_weighs_nothing(size, seed, layout):
    order = sampler(size, seed, layout)
    cursor = Cursor()
    for _ in range(3):
        for replica in range(order.replicas):
            for slots in order.microbatches(cursor, replica):
                assert len(slots.indices) == len(slots.weights) == order.batch.micro
                assert set(slots.weights) <= {0.0, 1.0}
                assert ((slots.indices >= 0) & (slots.indices < size)).all()
        cursor = order.advance(cursor)


@untimed
@given(st.integers(20, 300), seeds, epochs)
def test_epochs_and_seeds_have_orders_of_their_own(size, seed, epoch):
    order = list(permute(np.arange(size), size, seed, epoch))
    assert order != list(permute(np.arange(size), size, seed, epoch + 1))
    assert order != list(permute(np.arange(size), size, seed + 1, epoch))


def test_the_order_of_a_released_version_never_changes():
    """A checkpoint's cursor means these samples."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == GOLDEN


def test_positions_spread_evenly():
    """Mean sample at the first position over many epochs."""
    first = [permute(np.array([0]), 1000, 7, epoch)[0] for epoch in range(2000)]
    assert np.mean(first) == pytest.approx(499.5, abs=4 * 288.7 / 2000**0.5)


@untimed
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 7))
def test_evaluation_counts_each_sample_once(size, batch_size, parts):
    shares = [list(share_of(size, batch_size, part, parts)) for part in range(parts)]
    batches = list(chain.from_iterable(shares))
    counted = chain.from_iterable(batch.indices[batch.weights == 1] for batch in batches)
    assert sorted(counted) == list(range(size))
    assert all(0 < len(batch.indices) <= batch_size for batch in batches)


@untimed
@given(st.integers(0, 200), st.integers(1, 9), st.integers(1, 7))
def test_all_ranks_evaluate_batches_of_the_same_sizes(size, batch_size, parts):
    """They call shared layers together."""
    shares = [[len(batch.indices) for batch in share_of(size, batch_size, part, parts)] for part in range(parts)]
    assert all(share == shares[0] for share in shares)


def test_samples_of_many_steps_are_drawn_at_once(monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing, "permute", lambda *given: drawn.append(given[0].size) or permute(*given))
    order, cursor = sampler(100_000, 7, (4, 2, 2)), Cursor(0, 3)
    for _ in range(1000):
        indices = [slots.indices for slots in order.microbatches(cursor, 1)]
        places = cursor.position + np.array([range(4, 8), range(12, 16)])
        np.testing.assert_array_equal(indices, permute(places, 100_000, 7, 0))
        # Whoever changes what he was given changes no other step.
        indices[0][:] = -1
        cursor = order.advance(cursor)
    assert drawn == [4096, 4096]


def test_a_microbatch_that_is_larger_than_what_is_drawn_at_once():
    order = sampler(10_000, 1, (6000, 1, 1))
    assert epoch_of(order, 0) == list(permute(np.arange(10_000), 10_000, 1, 0))
