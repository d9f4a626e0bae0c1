"""When replicas meet and what becomes of their average: functions of plain numbers and of tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.relaxed import Bmuf, LocalSgd
from disttrain_trainer.parallel.average import buckets
from disttrain_trainer.parallel.local_sgd.sync_schedule import Averaging, Plan
from disttrain_trainer.parallel.local_sgd.update import BlockMomentum, OuterSgd

SMALL = st.integers(1, 12)
NUMBERS = st.floats(-1e6, 1e6)
FACTORS = st.floats(0, 0.99)
# The first of torch's optimizers in a process takes seconds.
UNHURRIED = settings(deadline=None)


@st.composite
def plans(draw):
    period, steps = draw(SMALL), draw(st.integers(1, 60))
    if draw(st.booleans()):
        return Plan.of(Bmuf(period=period, warmup_steps=draw(st.integers(0, 70))), steps)
    factor = draw(st.integers(2, 5))
    longest = draw(st.sampled_from([None, period * factor]))
    return Plan.of(LocalSgd(period=period, warmup_steps=draw(st.integers(0, 70)), global_period=longest), steps)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


class TestPlan:
    @UNHURRIED
    @given(plans())
    def test_all_are_together_at_the_end_and_never_longer_apart_than_the_period(self, plan):
        assert plan.together(plan.steps)
        apart = 0
        for done in range(1, plan.steps + 1):
            apart = 0 if plan.together(done) else apart + 1
            assert apart < plan.global_period

    @UNHURRIED
    @given(plans())
    def test_a_pod_meets_as_often_as_its_period_says_once_replicas_are_alone(self, plan):
        for done in range(plan.summed_steps + 1, plan.steps):
            alone = done - plan.summed_steps
            assert (plan.averaging(done) is Averaging.NONE) == (alone % plan.period != 0)

    @UNHURRIED
    @given(plans())
    def test_without_a_global_period_pods_have_no_meetings(self, plan):
        if plan.global_period == plan.period:
            assert Averaging.POD not in {plan.averaging(done) for done in range(1, plan.steps + 1)}

    @UNHURRIED
    @given(plans())
    def test_a_block_has_the_averagings_of_its_steps(self, plan):
        if plan.summed_steps < plan.steps:
            steps = range(plan.summed_steps + 1, plan.summed_steps + plan.block + 1)
            kinds = [plan.averaging(done) for done in steps]
            assert (kinds.count(Averaging.ALL), kinds.index(Averaging.ALL)) == (1, plan.block - 1)
            assert kinds.count(Averaging.POD) == plan.pod_averagings

    def test_of_local_sgd_the_warmup_sums_gradients_of_bmuf_it_takes_averages(self):
        local, bmuf = (Plan.of(kind(period=4, warmup_steps=6), 20) for kind in (LocalSgd, Bmuf))
        assert [local.sums_gradients(done) for done in (0, 5, 6)] == [True, True, False]
        assert [done for done in range(7, 21) if local.averaging(done) is Averaging.ALL] == [10, 14, 18, 20]
        assert not bmuf.sums_gradients(0)
        assert [done for done in range(1, 21) if bmuf.averaging(done) is Averaging.ALL] == [4, 8, 12, 16, 20]
        assert [bmuf.takes_average(done) for done in (4, 8)] == [True, False]


class TestBlockMomentum:
    @UNHURRIED
    @given(NUMBERS, NUMBERS, NUMBERS, st.booleans())
    def test_without_momentum_and_at_rate_1_it_is_the_average_bit_for_bit(self, previous, mean, momentum, nesterov):
        block = BlockMomentum(0.0, 1.0, nesterov)(tensor(previous), tensor(mean), tensor(momentum))
        assert torch.equal(block.model, tensor(mean))
        assert torch.equal(block.start, tensor(mean))

    @UNHURRIED
    @given(st.lists(NUMBERS, min_size=1, max_size=6), FACTORS, st.floats(0.1, 2), st.booleans())
    def test_it_follows_the_papers_formulas(self, means, momentum, rate, nesterov):
        model, kept = tensor(0.5), tensor(0.0)
        expected, filtered, start = 0.5, 0.0, 0.5
        for mean in means:
            block = BlockMomentum(momentum, rate, nesterov)(model, tensor(mean), kept)
            model, kept = block.model, block.momentum
            filtered = momentum * filtered + rate * (mean - start)
            expected += filtered
            start = expected + momentum * filtered if nesterov else expected
            scale = 1e-9 * max(1.0, *(abs(number) for number in means))
            assert [float(model), float(kept), float(block.start)] == pytest.approx(
                [expected, filtered, start], rel=1e-9, abs=scale
            )

    @pytest.mark.parametrize("nesterov", [True, False])
    def test_with_the_default_momentum_an_average_change_counts_n_times_in_the_end(self, nesterov):
        """N replicas that change by 1 each in one block, then no more: the model has changed by N."""
        replicas = 4
        update = BlockMomentum(1 - 1 / replicas, 1.0, nesterov)
        block = update(tensor(0.0), tensor(1.0), tensor(0.0))
        for _ in range(200):
            block = update(block.model, block.start, block.momentum)
        assert float(block.model) == pytest.approx(replicas)


@UNHURRIED
@given(st.lists(NUMBERS, min_size=1, max_size=6), st.floats(0.1, 2), st.floats(0.1, 0.99))
def test_the_outer_step_is_torchs_nesterov_sgd(means, rate, momentum):
    expected = torch.nn.Parameter(tensor(0.5))
    outer = torch.optim.SGD([expected], lr=rate, momentum=momentum, nesterov=True)
    model, kept = tensor(0.5), tensor(0.0)
    for mean in means:
        block = OuterSgd(rate, momentum)(model, tensor(mean), kept)
        model, kept = block.model, block.momentum
        assert torch.equal(block.start, model)
        expected.grad = expected.detach() - mean
        outer.step()
        assert float(model) == pytest.approx(expected.item(), rel=1e-9, abs=1e-9 * max(map(abs, means), default=1))


@UNHURRIED
@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), st.integers(1, 60))
def test_buckets_hold_everything_once_in_order_and_one_format_each(shapes, size_bytes):
    tensors = [torch.zeros(count, dtype=torch.float64 if wide else torch.float32) for count, wide in shapes]
    found = list(buckets(tensors, size_bytes))
    assert [id(one) for bucket in found for one in bucket] == [id(one) for one in tensors]
    for bucket in found:
        assert len({one.dtype for one in bucket}) == 1
        assert sum(one.nbytes for one in bucket[:-1]) < size_bytes
