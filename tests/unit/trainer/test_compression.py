"""Codecs of gradients, as functions: what is sent plus what is kept is what there was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_trainer.compression.blocks import BLOCK, INT8, ONE_BIT
from disttrain_trainer.compression.packing import pack, shapes_of, unpack
from disttrain_trainer.compression.sparse import kept_count, largest, random_indices, ratio_at, with_momentum, without

FORMATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")

sizes = st.integers(1, 3 * BLOCK + 5)
seeds = st.integers(0, 2**31)
formats = st.sampled_from(FORMATS[:2])


def drawn(size: int, seed: int, number_format: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers of very different magnitudes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, generator=generator, dtype=torch.float64)
    return (values * 10 ** torch.randint(-6, 3, (size,), generator=generator)).to(number_format)


@settings(deadline=None)
@given(sizes, seeds, formats)
def test_int8_is_right_to_half_a_scale(size, seed, number_format):
    values = drawn(size, seed, number_format)
    payload = INT8.encode(values)
    scales = payload[1].repeat_interleave(BLOCK)[:size]
    assert ((INT8.decode(payload, size) - values).abs() <= 0.5001 * scales).all()


@settings(deadline=None)
@given(sizes, seeds, formats)
def test_one_bit_keeps_signs_and_the_mean_magnitude_of_each_block(size, seed, number_format):
    values = drawn(size, seed, number_format)
    decoded = ONE_BIT.decode(ONE_BIT.encode(values), size)
    assert torch.equal(decoded >= 0, values >= 0)
    for before, after in zip(values.split(BLOCK), decoded.split(BLOCK), strict=True):
        torch.testing.assert_close(after.abs(), before.abs().mean().expand(len(before)))


@pytest.mark.parametrize("codec", [INT8, ONE_BIT], ids=["Int8", "OneBit"])
class TestBlocks:
    def test_zeros_stay_zeros(self, codec):
        assert torch.equal(codec.decode(codec.encode(torch.zeros(300)), 300).abs(), torch.zeros(300))

    @pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
    def test_a_block_with_a_number_that_is_not_finite_has_no_finite_one(self, codec, wrong):
        values = drawn(BLOCK + 1, 1, torch.float32)
        values[3] = wrong
        decoded = codec.decode(codec.encode(values), BLOCK + 1)
        assert not decoded[:BLOCK].isfinite().any()
        assert decoded[BLOCK:].isfinite().all()

    def test_sizes_of_a_payload_depend_on_the_size_alone(self, codec):
        payloads = [codec.encode(drawn(777, seed)) for seed in (1, 2)]
        assert shapes_of(payloads[0]) == shapes_of(payloads[1])


def test_int8_does_not_wrap_around_where_the_scale_is_subnormal():
    values = torch.tensor([190.0, -190.0, 1.0]) * 2.0**-149
    assert torch.equal(INT8.decode(INT8.encode(values), 3).sign()[:2], torch.tensor([1.0, -1.0]))


@settings(deadline=None)
@given(sizes, seeds, seeds, st.floats(0.001, 1), st.booleans(), formats)
def test_what_is_sent_and_kept_is_the_gradient_and_what_was_kept(size, seed, other, ratio, random, number_format):
    gradient, residual = drawn(size, seed, number_format), drawn(size, other, number_format)
    values = residual + with_momentum(gradient, None, 0)
    count = kept_count(size, ratio)
    indices = random_indices(size, count, (seed, 3, 1), CPU) if random else largest(values, count)
    kept = without(values, indices)
    sent = torch.zeros_like(values).index_add_(0, indices, values[indices])
    assert len(indices) == len(set(indices.tolist())) == count
    assert torch.equal(sent + kept, gradient + residual)
    assert (kept[indices] == 0).all()
    if ratio == 1:
        assert torch.equal(sent, values)


@settings(deadline=None)
@given(sizes, seeds, st.floats(0.001, 1))
def test_nothing_larger_is_kept_than_is_sent(size, seed, ratio):
    values = drawn(size, seed)
    indices = largest(values, kept_count(size, ratio))
    assert values[indices].abs().min() >= without(values, indices).abs().max()


@settings(deadline=None)
@given(st.integers(1, 10_000), st.floats(1e-6, 1))
def test_at_least_one_number_is_sent_and_at_most_all(size, ratio):
    assert 1 <= kept_count(size, ratio) <= size
    assert kept_count(size, 1.0) == size


class TestRandomIndices:
    def test_other_seeds_steps_and_buckets_give_others(self):
        triples = [(seed, step, bucket) for seed in (0, 1, 2) for step in range(5) for bucket in range(5)]
        drawn = {tuple(random_indices(1000, 50, triple, CPU).tolist()) for triple in triples}
        assert len(drawn) == len(triples)

    def test_every_number_comes_up_in_the_long_run(self):
        seen = torch.cat([random_indices(100, 10, (7, step, 0), CPU) for step in range(200)])
        counts = seen.bincount(minlength=100)
        # 20 expected of each; five standard deviations.
        assert counts.min() > 0
        assert counts.max() < 42

    def test_the_trainers_own_random_stream_is_left_alone(self):
        before = torch.get_rng_state()
        random_indices(100, 10, (1, 2, 3), CPU)
        assert torch.equal(torch.get_rng_state(), before)


class TestWarmUp:
    def test_the_ratio_falls_from_one_by_the_same_factor_in_each_step(self):
        ratios = [ratio_at(step, 0.001, 3) for step in range(6)]
        assert ratios == pytest.approx([1, 0.1, 0.01, 0.001, 0.001, 0.001])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.sampled_from([*FORMATS, torch.int8, torch.int32])), min_size=1))
def test_packing_loses_nothing(shapes):
    parts = [torch.arange(size).to(number_format) for size, number_format in shapes]
    packed = pack(parts)
    assert packed.nbytes == sum(part.nbytes for part in parts)
    for before, after in zip(parts, unpack(packed, shapes_of(parts)), strict=True):
        assert after.dtype is before.dtype
        assert torch.equal(after, before)
