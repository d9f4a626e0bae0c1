"""Our all-reduces: what their plans say, and that ranks which follow them have the backend's sum."""

import math

import pytest
import torch

from disttrain_trainer.collectives.schedules import SCHEDULES, Schedule, central, chunk_sizes, ring, ring_bytes, tree
from tests.unit.trainer.collective_ranks import FORMATS, SIZES, numbers
from tests.unit.trainer.worlds import how_they_ended, run_ranks

RANKS = range(1, 10)
WORLD = 4
ALGORITHMS = [algorithm.value for algorithm in SCHEDULES]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("plan", SCHEDULES.values(), ids=ALGORITHMS)
class TestPlan:
    def test_every_rank_ends_with_the_sum_of_all(self, plan, ranks):
        everybody = frozenset(range(ranks))
        history = plan(ranks).contributions()
        end = history[-1] if history else [[everybody]]
        assert all(contributors == everybody for chunks in end for contributors in chunks)

    def test_nothing_is_added_twice(self, plan, ranks):
        schedule = plan(ranks)
        held = [[[frozenset({rank})] * schedule.chunks for rank in range(ranks)], *schedule.contributions()]
        for before, transfers in zip(held, schedule.rounds, strict=False):
            for one in (transfer for transfer in transfers if transfer.adds):
                assert not before[one.source][one.chunk] & before[one.target][one.chunk]


@pytest.mark.parametrize("ranks", range(2, 10))
class TestCosts:
    """Bytes over the busiest link for 1000 x ranks numbers of 4 bytes."""

    def hottest(self, schedule: Schedule, ranks: int) -> float:
        return schedule.hottest_link(1000 * ranks, 4) / (4000 * ranks)

    def test_the_ring_needs_less_than_twice_the_numbers_however_many_ranks(self, ranks):
        assert self.hottest(ring(ranks), ranks) == pytest.approx(2 * (ranks - 1) / ranks)
        assert len(ring(ranks).rounds) == 2 * (ranks - 1)

    def test_the_tree_grows_with_the_logarithm(self, ranks):
        assert self.hottest(tree(ranks), ranks) == math.ceil(math.log2(ranks))
        assert len(tree(ranks).rounds) == 2 * math.ceil(math.log2(ranks))

    def test_the_centre_grows_with_the_ranks(self, ranks):
        assert self.hottest(central(ranks), ranks) == ranks - 1
        assert len(central(ranks).rounds) == 2

    def test_the_formula_of_a_ring_is_what_our_ring_sends(self, ranks):
        assert {ring(ranks).sent(rank, 1000 * ranks, 4) for rank in range(ranks)} == {ring_bytes(ranks, 4000 * ranks)}


@pytest.mark.parametrize("size", [0, 1, 6, 7, 1001])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_sizes_of_chunks_are_torchs(size, chunks):
    assert chunk_sizes(size, chunks) == [part.numel() for part in torch.zeros(size).tensor_split(chunks)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """For each rank of one world: what it holds after each sum."""
    folder = tmp_path_factory.mktemp("collectives")
    module = "tests.unit.trainer.collective_ranks"
    ended = run_ranks(folder / "run", None, WORLD, module=module, RESULTS=str(folder))
    assert [rank.code for rank in ended] == [0] * WORLD, how_they_ended(ended)
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("ranks", range(1, WORLD + 1))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
class TestRanks:
    def test_the_sum_is_right_in_every_format_and_size(self, results, algorithm, ranks):
        for size in SIZES:
            for number_format in FORMATS:
                expected = sum(numbers(rank, size, torch.float64) for rank in range(ranks))
                for result in results[WORLD - ranks :]:
                    found, _ = result[(algorithm, ranks, size, number_format)]
                    assert found.dtype is number_format
                    assert torch.equal(found.double(), expected)

    def test_the_sum_is_the_backends_and_the_same_bits_on_every_rank(self, results, algorithm, ranks):
        sums = [result[(algorithm, ranks)] for result in results[WORLD - ranks :]]
        first, backend = sums[0]
        assert all(torch.equal(found, first) for found, _ in sums)
        assert torch.linalg.vector_norm(first - backend) <= 1e-14 * torch.linalg.vector_norm(backend)
        if ranks == 2:
            assert torch.equal(first, backend)

    def test_ranks_send_what_the_plan_says(self, results, algorithm, ranks):
        plan = next(plan for name, plan in SCHEDULES.items() if name == algorithm)(ranks)
        for size in SIZES:
            for number_format in FORMATS:
                sent = [result[(algorithm, ranks, size, number_format)][1] for result in results[WORLD - ranks :]]
                assert sent == [plan.sent(rank, size, number_format.itemsize) for rank in range(ranks)]
