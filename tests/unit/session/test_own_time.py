"""A session's slow rank: what a rank says of a step, who is named by it, and when nobody is."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism
from disttrain_api.report import SlowRank
from disttrain_session import own_time
from disttrain_session.own_time import Judge, OwnTime, Seconds, read
from disttrain_session.place import place_of
from disttrain_trainer.metrics.stragglers import WINDOWS
from disttrain_trainer.runtime.device import GLOO, Device

CPU = Device(torch.device("cpu"), GLOO)
ALIKE = [Seconds(0.1, 0.4), Seconds(0.1, 0.4)]


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(Device, "mark", lambda self: found.now)
    monkeypatch.setattr(own_time, "time", SimpleNamespace(monotonic=found))
    return found


@pytest.fixture
def alone() -> Iterator[Any]:
    """A process group of this process, as a world of the trainer's."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield SimpleNamespace(rank=0, size=1, device=CPU, mesh=Mesh.of(Parallelism(), 1))
    dist.destroy_process_group()


class Working(nn.Module):
    """Works 3 s and waits for others in its forward pass, and works 4 s in its backward pass."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear, self._clock = nn.Linear(2, 1), clock

    def forward(self, x: Tensor) -> Tensor:
        self._pass(3.0)
        dist.all_reduce(torch.ones(1))
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda _: self._pass(4.0))
        return y

    def _pass(self, seconds: float) -> None:
        self._clock.now += seconds


def of_a_step(own: OwnTime, model: nn.Module, clock: Clock) -> Seconds | None:
    """What a rank says of a step in which it reads for 2 s."""
    with own.loading():
        clock.now += 2.0
    model(torch.ones(1, 2)).sum().backward()
    found = read(own.seconds())
    return found[0] if found else None


def test_a_rank_says_how_long_it_reads_and_computes_without_its_waits(alone, clock, monkeypatch) -> None:
    def waits(work: Any, *arguments: Any) -> None:
        clock.now += 5.0

    monkeypatch.setattr(dist.distributed_c10d.Work, "wait", waits)
    own, model = OwnTime(alone, placed=True), Working(clock)
    own.watch(model)
    assert of_a_step(own, model, clock) is None, "only steps that all look at are timed"
    own.look(looks=True)
    assert of_a_step(own, model, clock) == (2.0, 7.0)
    assert dist.distributed_c10d.Work.wait is waits
    own.look(looks=True)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert of_a_step(own, model, clock) == (2.0, 7.0), "an evaluation is no part of a step"
    own.look(looks=True)
    model(torch.ones(1, 2))
    assert read(own.seconds()) == [(0.0, -1.0)], "without a backward pass nothing is known"
    own.look(looks=False)
    assert of_a_step(own, model, clock) is None


@pytest.mark.parametrize(
    ("ranks", "known"),
    [((2, 3), True), ((1, 3), True), ((2,), True), ((0, 1, 2, 3), True), ((0, 3), False), ((1, 2, 3), False)],
    ids=["shards", "replicas", "one", "all", "others", "three of them"],
)
def test_with_a_group_of_some_of_the_ranks_a_rank_says_nothing_of_its_passes(alone, clock, monkeypatch, ranks, known):
    alone.size, alone.mesh = 4, Mesh.of(Parallelism(data_parallel_shard_degree=2), 4)
    own, model = OwnTime(alone, placed=True), Working(clock)
    own.watch(model)
    everyone = {"default": {rank: rank for rank in range(4)}, "another": {rank: at for at, rank in enumerate(ranks)}}
    monkeypatch.setattr(type(dist.distributed_c10d._world), "pg_group_ranks", property(lambda _: everyone))
    own.look(looks=True)
    assert of_a_step(own, model, clock) == (2.0, 7.0 if known else -1.0)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rank_whose_model_is_compiled_says_nothing_of_its_passes(alone, clock, in_place: bool) -> None:
    own, model = OwnTime(alone, placed=True), Working(clock)
    own.watch(model)
    if in_place:
        model.linear.compile(backend="eager")
    else:
        model.linear = torch.compile(model.linear, backend="eager")
    own.look(looks=True)
    assert of_a_step(own, model, clock) == (2.0, -1.0)


def test_a_rank_whose_pod_is_not_known_says_nothing(alone, clock) -> None:
    own = OwnTime(alone, placed=False)
    own.look(looks=True)
    assert read(own.seconds()) == [(-1.0, -1.0)]


@pytest.mark.parametrize(
    ("rank", "ranks_here", "more", "known"),
    [
        (3, 2, {}, True),
        (3, 2, {"PET_NPROC_PER_NODE": "2"}, True),
        (3, 2, {"PET_NPROC_PER_NODE": "1"}, False),
        (1, 2, {}, False),
    ],
    ids=["by the pod's number", "as the job has it", "other ranks than the job's", "torchrun numbers pods anew"],
)
def test_a_rank_knows_whether_the_operator_finds_its_pod(rank, ranks_here, more, known) -> None:
    environment = {"DISTTRAIN_JOB_UID": "uid-1", "DISTTRAIN_SCRATCH": "/scratch", "NODE_RANK": "1", "RANK": str(rank)}
    environment |= {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(ranks_here), **more}
    place = place_of(environment)
    assert place is not None
    assert place.is_of_its_pod(environment) is known


def named(found: list[Seconds], pod: int = 1, device: Device = CPU) -> SlowRank | None:
    """Who is named after some windows of steps of a second, each of which is looked at."""
    clock, said = Clock(), []
    judge = Judge(len(found), pod, device, said.append, clock)
    for _ in range(61 * (WINDOWS + 1)):
        assert judge.wants
        judge.step(True, found)
        assert not judge.wants
        clock.now += 1.0
    assert len(said) < 2
    return said[0] if said else None


@pytest.mark.parametrize(
    ("found", "rank"),
    [
        ([Seconds(0.1, 0.4), Seconds(0.1, 0.6)], 1),
        ([Seconds(0.4, 0.1), Seconds(0.1, 0.1)], 0),
        ([Seconds(0.4), Seconds(0.1, 0.9)], 0),
        (ALIKE, None),
        ([Seconds(0.1, 0.4), Seconds(0.1, 0.6), Seconds(0.1, 0.6), Seconds(0.1, 0.4), Seconds(0.1, 0.4)], None),
        ([Seconds(0.4), Seconds()], None),
    ],
    ids=[
        "slow passes",
        "slow samples",
        "passes that one of them does not know",
        "alike",
        "one that may wait for the other",
        "a pod that is not known",
    ],
)
def test_who_is_slow(found: list[Seconds], rank: int | None) -> None:
    slow = named(found)
    assert (None if slow is None else slow.rank) == rank


def test_of_ranks_of_one_pod_that_are_slow_together_one_is_named() -> None:
    slow = named([*ALIKE, *ALIKE, Seconds(0.1, 0.8), Seconds(0.1, 0.9)], pod=2)
    assert slow is not None
    assert slow.rank == 5
