"""Hooks of DDP: what a replica sends and keeps of known gradients, and what two replicas get where torch has a hook."""

from types import SimpleNamespace

import pytest
import torch

from disttrain_api.parallelism import Compression, DataParallel
from disttrain_trainer.parallel.comm_hooks.attach import build_gradient_sum
from disttrain_trainer.parallel.comm_hooks.base import HookedSum
from tests.unit.trainer.hook_ranks import gradient_of
from tests.unit.trainer.worlds import run_ranks

RANKS = 2


class Alone:
    """The one replica of a job, whose sum is what it sends itself. Its gradients are one bucket."""

    def __init__(self, **compression):
        settings = DataParallel(compression=Compression.model_validate(compression))
        self.hook = build_gradient_sum(settings, SimpleNamespace(size=lambda: 1), seed=3)
        self.steps = 0

    def send(self, gradient, *, undoable=False):
        bucket = torch.as_tensor(gradient, dtype=torch.float64).clone()
        self.hook.begin(self.steps, undoable=undoable)
        self.steps += 1
        return self.hook.reduce(SimpleNamespace(buffer=lambda: bucket, index=lambda: 0)).wait()

    @property
    def residual(self):
        return self.hook.kept["residual/0"]


@pytest.fixture(autouse=True)
def without_network(monkeypatch):
    def gather(self, packed, use, *_):
        return done(use(packed[None]))

    def sum_up(self, values, algorithm=None):
        return done(values)

    def done(values):
        future = torch.futures.Future()
        future.set_result(values)
        return future

    monkeypatch.setattr(HookedSum, "gather", gather)
    monkeypatch.setattr(HookedSum, "sum_up", sum_up)


def test_momentum_is_gathered_of_what_waits_and_forgotten_of_what_is_sent():
    """Lin et al. 2018, sections 3.1 and 3.2, by hand: v = v / 2 + g, u = u + v; of two numbers the larger u is sent,
    and both its u and its v become 0.
    """
    replica = Alone(name="TopK", ratio=0.5, momentumCorrection=0.5)
    assert replica.send([4, 1]).tolist() == [4, 0]
    # v = [0 / 2 + 1, 1 / 2 + 1], u = [1, 1 + 1.5]; without momentum 2 would be sent.
    assert replica.send([1, 1]).tolist() == [0, 2.5]
    # v = [1 / 2 + 2, 0 / 2 + 1], u = [1 + 2.5, 1].
    assert replica.send([2, 1]).tolist() == [3.5, 0]
    # v = [0 / 2 + 0, 1 / 2 + 0], u = [0, 1 + 0.5]: it goes on where there is no gradient any more.
    assert replica.send([0, 0]).tolist() == [0, 1.5]
    assert replica.residual.tolist() == [0, 0]


def test_without_momentum_correction_the_gradients_themselves_are_gathered():
    replica = Alone(name="TopK", ratio=0.5)
    assert [replica.send(gradient).tolist() for gradient in ([4, 1], [1, 1], [2, 1])] == [[4, 0], [0, 2], [3, 0]]
    assert replica.residual.tolist() == [0, 1]


@pytest.mark.parametrize(
    "compression",
    [{"name": "OneBit"}, {"name": "TopK", "ratio": 0.1}, {"name": "RandomK", "ratio": 0.1}],
    ids=lambda settings: settings["name"],
)
def test_sent_and_kept_are_the_gradient_and_what_was_kept(compression):
    replica, before = Alone(**compression), 0
    for seed in range(4):
        gradient = drawn(seed)
        sent = replica.send(gradient)
        torch.testing.assert_close(sent + replica.residual, gradient + before, rtol=1e-12, atol=1e-12)
        before = replica.residual
    assert before.norm() > 0


def drawn(seed, size=777):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KEEPING = [
    {"name": "OneBit"},
    {"name": "TopK", "ratio": 0.1},
    {"name": "TopK", "ratio": 0.1, "momentumCorrection": 0.5},
    {"name": "RandomK", "ratio": 0.1},
]


@pytest.mark.parametrize("compression", KEEPING, ids=str)
@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_is_undone_leaves_nothing(compression, before):
    found, expected = Alone(**compression), Alone(**compression)
    for seed in range(before):
        found.send(drawn(seed), undoable=True)
        expected.send(drawn(seed))
    found.send(drawn(7) * torch.nan, undoable=True)
    found.hook.undo()
    # The number of the step goes on, by which random numbers are chosen.
    expected.steps += 1
    assert torch.equal(found.send(drawn(8), undoable=True), expected.send(drawn(8)))
    assert torch.equal(found.residual, expected.residual)


@pytest.mark.parametrize("compression", KEEPING, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_not_finite_shows_wherever_it_is(compression, value):
    """Red where it is only kept: then no later step knows when it came."""
    for place in (0, 400, 776):
        gradient = drawn(place)
        gradient[place] = value
        assert not Alone(**compression).send(gradient, undoable=True).norm().isfinite()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """By format: the mean of two ranks' gradients as our hook gives it, and as torch's does."""
    folder = tmp_path_factory.mktemp("hooks")
    ended = run_ranks(folder, None, RANKS, module="tests.unit.trainer.hook_ranks", RESULTS=str(folder))
    assert [rank.code for rank in ended] == [0] * RANKS, ended[0].err
    return torch.load(folder / "0.pt")


@pytest.mark.parametrize("name", ["FP16", "BF16"])
def test_two_replicas_get_what_torchs_hooks_give_them(both, name):
    own, theirs = both[name]
    assert torch.equal(own[:-1], theirs[:-1])
    mean = sum(gradient_of(rank) for rank in range(RANKS)) / RANKS
    assert not torch.equal(own, mean), "fewer digits were sent"
    torch.testing.assert_close(own, mean, rtol=1e-2, atol=1e-2)


def test_a_gradient_whose_part_of_the_mean_fits_into_fp16_is_sent(both):
    own, theirs = (float(values[-1]) for values in both["FP16"])
    assert own == pytest.approx(70000 / RANKS, rel=1e-3)
    assert theirs == float("inf"), "torch divides after it has shortened"
