"""Ways of summing gradients in real runs: DDP where all is sent, nothing lost where it is not, resumed exactly."""

import pytest
import torch

from disttrain_trainer.collectives.schedules import SCHEDULES, ring_bytes
from disttrain_trainer.compression.blocks import BLOCK
from disttrain_trainer.compression.sparse import kept_count, ratio_at
from tests.soak import SOAK
from tests.unit.trainer.comparisons import LOSS, require_same, require_same_bits, series, stored
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, job, run_cases, run_ranks, small, user

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

TOLERANCE = 1e-10
STEPS = 6
WITH_ALL_CASES = [2, 3] if SOAK else [3]
"""Ranks of the worlds in which it is also seen what is lost and what is kept; more cases than time allows in all."""


def all_reduce(algorithm, **compression):
    settings = {"allReduce": algorithm, **({"compression": compression} if compression else {})}
    return {"dataParallel": settings}


def compressed(name, **settings):
    return {"dataParallel": {"compression": {"name": name, **settings}}}


ALGORITHMS = {name.value: all_reduce(name.value) for name in SCHEDULES}
SENDS_ALL = {
    **ALGORITHMS,
    "TopK of everything": compressed("TopK", ratio=1),
    "RandomK of everything": compressed("RandomK", ratio=1),
    "RandomK of everything by a ring": all_reduce("Ring", name="RandomK", ratio=1),
    "momentum correction of everything": compressed("TopK", ratio=1, momentumCorrection=0.9),
    "OneBit, warming up": compressed("OneBit", warmupSteps=STEPS),
    "PowerSGD, warming up": compressed("PowerSGD", warmupSteps=STEPS),
}
EVERY_STEP = {"logging": {"interval": 1}}
PLAIN_SGD = {"name": "SGD", "learningRate": 0.1}
DOUBLE = small(steps=STEPS, optimizer=PLAIN_SGD, gradientAccumulationSteps=2, **EVERY_STEP)
# Several buckets, in float32, with dropout.
WIDE = small(steps=STEPS, model=user("wide_mlp"), optimizer=PLAIN_SGD, **EVERY_STEP)

LOSSY = {
    "FP16": compressed("FP16"),
    "BF16 by a tree": all_reduce("Tree", name="BF16"),
    "Int8": compressed("Int8"),
    "OneBit": compressed("OneBit", warmupSteps=2),
    "TopK": compressed("TopK", ratio=0.1, warmupSteps=3),
    "TopK with momentum": compressed("TopK", ratio=0.1, momentumCorrection=0.9),
    "RandomK": compressed("RandomK", ratio=0.1),
    "RandomK in the centre": all_reduce("Central", name="RandomK", ratio=0.1),
    "PowerSGD": compressed("PowerSGD", rank=2, warmupSteps=2),
}
# Gradients that do not depend on the parameters, so that what is applied can be compared with what was kept.
FIXED = small(steps=STEPS, model=user("fixed_gradient"), optimizer=PLAIN_SGD, **EVERY_STEP)
CONSERVING = compressed("PowerSGD", rank=1)


def cases():
    yield "plain", [{"training": DOUBLE}]
    yield "plain, wide", [{"training": WIDE}]
    yield "plain, fixed", [{"training": FIXED}]
    for name, parallelism in SENDS_ALL.items():
        yield name, [{"training": DOUBLE, "parallelism": parallelism}]
    for name, parallelism in LOSSY.items():
        run = {"training": WIDE, "parallelism": parallelism}
        yield f"{name}: through", [run]
        yield f"{name}: resumed", [{**run, "stop_after": 3}, {**run, "stop_after": 1}, run]
    yield "PowerSGD, fixed", [{"training": FIXED, "parallelism": CONSERVING}]
    yield (
        "another compression",
        [
            {"training": DOUBLE, "parallelism": compressed("OneBit"), "stop_after": 3},
            {"training": DOUBLE, "parallelism": compressed("TopK", ratio=1)},
        ],
    )


def ranks_of(world):
    return f"{world} ranks"


@pytest.fixture(scope="module", params=[2, 3, 4], ids=ranks_of)
def world(request, tmp_path_factory):
    """Number of ranks, folder and results of all cases."""
    folder = tmp_path_factory.mktemp("sums")
    chosen = dict(cases())
    if request.param not in WITH_ALL_CASES:
        chosen = {name: chosen[name] for name in ("plain", *SENDS_ALL)}
    return request.param, folder, run_cases(folder, request.param, chosen)


with_all_cases = pytest.mark.parametrize("world", WITH_ALL_CASES, ids=ranks_of, indirect=True, scope="module")


def steps_of(result):
    return [line for line in result["metrics"] if "lr" in line]


@pytest.mark.parametrize("name", SENDS_ALL)
def test_where_everything_is_sent_it_is_plain_ddp(world, name):
    ranks, _, results = world
    expected, found = results["plain"]["parameters"], results[name]["parameters"]
    assert results[name]["errors"] == [None]
    require_same(found, expected, TOLERANCE)
    if ranks == 2:
        require_same_bits(found, expected)


@with_all_cases
@pytest.mark.parametrize("name", LOSSY)
class TestLossy:
    def test_a_resumed_run_equals_one_that_never_stopped(self, world, name):
        _, _, results = world
        expected, found = (results[f"{name}: {how}"] for how in ("through", "resumed"))
        assert found["errors"][-1] is None
        require_same_bits(found["parameters"], expected["parameters"])
        assert len(series(expected)) == STEPS
        for key in (LOSS, "comm/gradient_bytes"):
            assert series(found, key) == series(expected, key)

    def test_it_differs_from_plain_ddp_and_still_learns(self, world, name):
        """So that equality above is not that of a setting without effect."""
        _, _, results = world
        plain, found = results["plain, wide"], results[f"{name}: through"]
        assert any(not torch.equal(found["parameters"][key], value) for key, value in plain["parameters"].items())
        assert series(found)[-1] < series(found)[0]


@with_all_cases
def test_what_was_applied_and_what_is_kept_is_what_plain_ddp_applies(world):
    """By PowerSGD, which has no hook of one replica alone; test_gradient_hooks.py has the others."""
    ranks, folder, results = world
    plain, found = (results[case]["parameters"]["weight"] for case in ("plain, fixed", "PowerSGD, fixed"))
    checkpoint = folder / "PowerSGD, fixed" / "test" / f"step-{STEPS}"
    # Its residuals are of gradients before they are divided by the number of ranks.
    kept = sum(residual for rank in range(ranks) for residual in residuals_of(checkpoint, rank)) / ranks
    assert torch.linalg.vector_norm(kept) > 0.01
    assert not torch.allclose(found, plain)
    whole = found - PLAIN_SGD["learningRate"] * kept.view_as(found)
    assert torch.linalg.vector_norm(whole - plain) <= TOLERANCE * torch.linalg.vector_norm(plain)


def residuals_of(checkpoint, rank):
    """What a rank has kept of each bucket."""
    return [value for key, value in stored(checkpoint, f"gradients.{rank}.").items() if "residual/" in key]


@with_all_cases
def test_another_compression_begins_with_nothing_kept_and_says_so(world):
    ranks, folder, results = world
    assert results["another compression"]["errors"][-1] is None
    lines = [line for line in (folder / "rank-0.out").read_text().splitlines() if "begins anew" in line]
    assert lines == [
        f"step-3 holds nothing that TopK over {ranks} replicas has kept of these gradients: it begins anew"
    ]
    assert "begins anew" not in (folder / "rank-1.out").read_text()


class TestBytes:
    """comm/gradient_bytes is what the busiest rank sends in a step."""

    def bytes_of(self, result):
        return [line["comm/gradient_bytes"] for line in steps_of(result)]

    def test_the_backends_is_computed_as_a_ring(self, world):
        ranks, _, results = world
        size = sum(value.nbytes for value in results["plain"]["parameters"].values())
        assert self.bytes_of(results["plain"]) == STEPS * [ring_bytes(ranks, size)]

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_our_algorithms_send_what_their_plans_say(self, world, name):
        ranks, _, results = world
        numbers = sum(value.numel() for value in results["plain"]["parameters"].values())
        plan = next(plan for algorithm, plan in SCHEDULES.items() if algorithm == name)(ranks)
        busiest = max(plan.sent(rank, numbers, 8) for rank in range(ranks))
        assert self.bytes_of(results[name]) == STEPS * [busiest]

    @with_all_cases
    def test_top_k_sends_values_and_places_to_all_others(self, world):
        ranks, _, results = world
        sizes = self.bucket_sizes(world, "TopK")
        expected = []
        for step in range(STEPS):
            counts = [(kept_count(size, ratio_at(step, 0.1, 3)), size) for size in sizes]
            expected.append((ranks - 1) * sum(count * (4 if count == size else 8) for count, size in counts))
        assert self.bytes_of(results["TopK: through"]) == expected
        assert expected[0] == (ranks - 1) * 4 * sum(sizes)

    @with_all_cases
    def test_int8_and_one_bit_send_a_scale_per_block(self, world):
        ranks, _, results = world
        sizes = self.bucket_sizes(world, "TopK")
        blocks = sum(-(-size // BLOCK) for size in sizes)
        assert self.bytes_of(results["Int8: through"]) == STEPS * [(ranks - 1) * (sum(sizes) + 4 * blocks)]
        bits = (ranks - 1) * (sum(-(-size // 8) for size in sizes) + 4 * blocks)
        dense = sum(ring_bytes(ranks, 4 * size) for size in sizes)
        assert self.bytes_of(results["OneBit: through"]) == [dense, dense, *4 * [bits]]

    @with_all_cases
    def test_random_k_sends_values_alone(self, world):
        ranks, _, results = world
        counts = [kept_count(size, 0.1) for size in self.bucket_sizes(world, "TopK")]
        assert self.bytes_of(results["RandomK: through"]) == STEPS * [sum(ring_bytes(ranks, 4 * n) for n in counts)]
        assert self.bytes_of(results["RandomK in the centre: through"]) == STEPS * [(ranks - 1) * 4 * sum(counts)]

    @with_all_cases
    def test_half_the_bits_are_half_the_bytes(self, world):
        ranks, _, results = world
        sizes = self.bucket_sizes(world, "TopK")
        assert self.bytes_of(results["FP16: through"]) == STEPS * [sum(ring_bytes(ranks, 2 * n) for n in sizes)]

    @with_all_cases
    def test_power_sgd_sends_two_thin_matrices_and_what_is_small(self, world):
        ranks, _, results = world
        parameters = results["plain, wide"]["parameters"].values()
        # All matrices get smaller by it, of 600 x 6 numbers, too.
        matrices = [value.shape for value in parameters if value.dim() == 2]
        vectors = sum(value.numel() for value in parameters if value.dim() == 1)
        numbers = vectors + sum(2 * (rows + columns) for rows, columns in matrices)
        found = self.bytes_of(results["PowerSGD: through"])
        assert found[2:] == pytest.approx(4 * [ring_bytes(ranks, 4 * numbers)], abs=len(matrices))
        assert found[0] > 20 * found[2]

    def bucket_sizes(self, world, name):
        """Numbers in each bucket, read from what a rank has kept of each."""
        _, folder, _ = world
        sizes = [one.numel() for one in residuals_of(folder / f"{name}: through" / "test" / f"step-{STEPS}", 0)]
        assert len(sizes) > 1
        return sizes


def test_another_number_of_replicas_begins_with_nothing_kept_and_says_so(tmp_path):
    lines = []
    for attempt, ranks in enumerate((2, 3), start=1):
        config = job(small(steps=2 * attempt), parallelism=compressed("OneBit"))
        folder = tmp_path / str(attempt)
        ended = run_ranks(folder, config, ranks, storage=tmp_path / "storage", attempt=attempt)
        assert [rank.code for rank in ended] == [0] * ranks, ended[0].err
        lines += [line for line in ended[0].out.splitlines() if "begins anew" in line]
    assert lines == ["step-2 holds nothing that OneBit over 3 replicas has kept of these gradients: it begins anew"]


@pytest.mark.parametrize(
    "parallelism", [ALGORITHMS["Ring"], compressed("TopK"), compressed("PowerSGD")], ids=["Ring", "TopK", "PowerSGD"]
)
def test_a_dead_peer_is_a_lost_peer(tmp_path, parallelism):
    training = small(steps=400, data=user("deadly_samples", rank=1))
    ended = run_ranks(tmp_path, job(training, parallelism=parallelism), ranks=3)
    assert ended[1].code == -9
    for rank in (ended[0], ended[2]):
        assert rank.report.error.reason == "PeerLost", rank.err
