"""What ranks call of a model that shards have cut is compared, and a difference is named on the rank that waits."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from disttrain_api.names import ExitCode
from disttrain_trainer.checks.layer_watch import watching_layers
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.parallel.layer_order import LayerOrder, difference
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.shard_code import of_shards
from tests.unit.trainer.worlds import job, run_ranks, small


class Two(nn.Module):
    """One of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.e = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * getattr(self, name)


class Layers(nn.Module):
    """Calls those that a test names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Two()

    def forward(self, x: torch.Tensor, path: str) -> torch.Tensor:
        for name in path:
            x = self.two(x, name) if name in "de" else getattr(self, name)(x)
        return x


@dataclass
class Rank:
    """A model as one of several ranks has it."""

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        self.model = Layers()
        for layer in self.model.children():
            fully_shard(layer, mesh=self.mesh)
        fully_shard(self.model, mesh=self.mesh)
        self.order = LayerOrder(self.model)

    def step(self, *paths: str) -> tuple[float, float]:
        """The digest of a step of so many passes."""
        self.model.zero_grad()
        for path in paths:
            self.model(torch.ones(2, 4), path).sum().backward()
        self.order.end_pass()
        return self.order.take()


@dataclass
class FakeWorld:
    """As many ranks, whose notes are these."""

    notes: list[list[int]]

    @property
    def size(self) -> int:
        return len(self.notes)

    def gather(self, value: object, kind: object) -> list[list[int]]:
        return self.notes


ALIKE = [("abc",), ("ab", "abc"), ("c",), ()]


@pytest.mark.parametrize("paths", ALIKE)
def test_ranks_that_call_the_same_have_the_same_digest(mesh: DeviceMesh, paths: tuple[str, ...]) -> None:
    ranks = [Rank(mesh) for _ in range(3)]
    digests = [rank.step(*paths) for rank in ranks]
    sums = [sum(numbers) for numbers in zip(*digests, strict=True)]
    ranks[0].order.require_alike(sums, FakeWorld([[]] * 3))  # type: ignore[arg-type]


UNLIKE = {
    "another layer": (("ab",), ("ac",), "rank 0 calls `b` where rank 2 calls `c`"),
    "another order": (("abc",), ("acb",), "rank 0 calls `b` where rank 2 calls `c`"),
    "one layer more": (("ab",), ("abc",), "rank 0 ends its forward pass where rank 2 calls `c`"),
    "one pass more": (("abc",), ("abc", "abc"), "rank 0 has no gradient of `two.d` where rank 2 calls the model"),
    "all passes, and more": (("abcde",), ("abcde", "a"), "rank 0 ends its step where rank 2 calls the model"),
    "a branch of equal size": (
        ("d",),
        ("e",),
        "rank 0 has no gradient of `two.e` where rank 2 has no gradient of `two.d`",
    ),
    "in the second pass": (("abc", "a"), ("abc", "b"), "rank 0 calls `a` where rank 2 calls `b`"),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_what_differs_is_named_on_all_ranks(mesh: DeviceMesh, case: str) -> None:
    first, other, message = UNLIKE[case]
    ranks = [Rank(mesh) for _ in range(3)]
    digests = [rank.step(*paths) for rank, paths in zip(ranks, (first, first, other), strict=True)]
    sums = [sum(numbers) for numbers in zip(*digests, strict=True)]
    world = FakeWorld([list(rank.order.notes.last) for rank in ranks])
    for rank in ranks:
        with pytest.raises(InvalidConfiguration, match=f"^`training.model`: {message}") as raised:
            rank.order.require_alike(sums, world)  # type: ignore[arg-type]
        assert raised.value.on_every_rank


def test_a_rank_that_is_only_slow_differs_in_nothing(mesh: DeviceMesh) -> None:
    """However far it is behind another one, in either direction."""
    order, moments = Rank(mesh).order, []
    rank = Rank(mesh)
    for path in ("abc", "ab", "c"):
        for layer in path:
            rank.model(torch.ones(2, 4), layer).sum().backward()
            moments.append(rank.order.notes)
        rank.order.take()
        moments.append(rank.order.notes)
    assert all(one != other for one, other in pairwise(moments))
    assert [difference(order, one, 1, other) for one in moments for other in moments] == [None] * len(moments) ** 2


@pytest.mark.parametrize("steps", [(0, 0), (0, 1), (1, 0)])
def test_a_rank_that_waits_for_another_layer_knows(mesh: DeviceMesh, steps: tuple[int, int]) -> None:
    """Also where one of the two has ended its step."""
    ranks = Rank(mesh), Rank(mesh)
    for rank, path, ended in zip(ranks, ("ab", "acb"), steps, strict=True):
        rank.step("abc")
        rank.model(torch.ones(2, 4), path)
        if ended:
            rank.order.take()
    found = difference(ranks[1].order, ranks[1].order.notes, 1, ranks[0].order.notes)
    assert found.startswith("`training.model`: rank 0 calls `b` where rank 1 calls `c`: shards gather a layer")


@pytest.mark.parametrize(
    ("path", "raised", "message"),
    [
        (
            "b",
            InvalidConfiguration,
            "^`training.model`: rank 0 calls `a` where rank 1 calls `b`: shards gather a layer",
        ),
        ("a", RuntimeError, "^Timed out$"),
    ],
)
def test_an_error_of_it_is_explained(mesh: DeviceMesh, path: str, raised: type[Exception], message: str) -> None:
    """Nothing is said of another rank that was only lost."""
    first, second, store = Rank(mesh), Rank(mesh), dist.HashStore()
    first.model(torch.ones(2, 4), "a")
    with pytest.raises(RuntimeError, match=r"^Timed out$"), watched(first, 0, store):
        raise RuntimeError("Timed out")
    second.model(torch.ones(2, 4), path)
    with pytest.raises(raised, match=message), watched(second, 1, store):
        raise RuntimeError("Timed out")


def watched(rank: Rank, number: int, store: dist.Store) -> AbstractContextManager[None]:
    world: Any = SimpleNamespace(rank=number, first=number == 0, store=store)
    return watching_layers(rank.order, world, Reporter(number, None))


def test_ranks_that_wait_for_each_other_end_with_the_layers_name(tmp_path: Path) -> None:
    """Long before their collective times out, and so that no restart follows."""
    training = small(model=of_shards("choosing", how="more"))
    ended = run_ranks(tmp_path, job(training, parallelism={SHARD: 2}), 2)
    assert ended[1].code == ExitCode.INVALID_CONFIGURATION, ended[1].err
    message = (
        "disttrain: InvalidConfiguration: `training.model`: rank 0 ends its forward pass where rank 1 calls `layers.1`"
    )
    assert message in ended[1].err
    assert ended[1].error.exit_code == ExitCode.INVALID_CONFIGURATION
