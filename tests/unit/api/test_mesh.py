"""Ranks, degrees and coordinates: the numbering that the documentation promises."""

import pytest

from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism

ALL = Mesh(pipeline=2, replicate=2, shard=3, context=2, tensor=2)


def test_neighbours_are_tensor_then_context_then_shard_then_replicate_then_pipeline() -> None:
    assert ALL.world_size == 48
    distances = {axis: ALL.groups(axis)[0][1] for axis in ("tensor", "context", "shard", "replicate", "pipeline")}
    assert distances == {"tensor": 1, "context": 2, "shard": 4, "replicate": 12, "pipeline": 24}
    assert all(ALL.rank(**ALL.coordinates(rank)) == rank for rank in range(48))


def test_the_replicas_are_what_the_degrees_leave() -> None:
    parallelism = Parallelism(context_parallel_degree=2, data_parallel_shard_degree=2)
    assert Mesh.of(parallelism, 8) == Mesh(replicate=2, shard=2, context=2)
    assert Mesh.of(parallelism, 8).describe() == "dp2 x fsdp2 x cp2"


def test_ranks_of_a_context_group_have_the_samples_of_one_replica() -> None:
    mesh = Mesh(replicate=2, shard=2, context=4)
    assert (mesh.data_parallel, mesh.parts) == (4, 16)


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (Mesh(replicate=3, context=2), Mesh(replicate=6)),
        (Mesh(replicate=3, shard=2, context=2), Mesh(replicate=3, shard=4)),
        (Mesh(pipeline=2, context=2, tensor=2), Mesh(pipeline=2, replicate=2, tensor=2)),
        (ALL, Mesh(pipeline=2, replicate=2, shard=6, tensor=2)),
    ],
)
def test_a_context_group_is_more_shards_or_else_more_replicas(mesh: Mesh, expected: Mesh) -> None:
    found = mesh.of_parameters
    assert found == expected
    # The same ranks are neighbours: what is averaged over an axis is averaged over these.
    axis = "shard" if mesh.shard > 1 else "replicate"
    together = {frozenset(ranks) for ranks in found.groups(axis)}
    assert all(any(set(ranks) <= group for group in together) for ranks in mesh.groups("context"))


@pytest.mark.parametrize(
    ("mesh", "alike"),
    [
        (Mesh(replicate=4), [(0, 1, 2, 3)]),
        (Mesh(replicate=2, context=2), [(0, 1, 2, 3)]),
        (Mesh(replicate=2, shard=2), [(0, 2), (1, 3)]),
        (Mesh(replicate=2, tensor=2), [(0, 2), (1, 3)]),
        (Mesh(pipeline=2, replicate=2), [(0, 1), (2, 3)]),
        (Mesh(pipeline=2, context=2), [(0, 1), (2, 3)]),
        (Mesh(shard=2, context=2), [(0,), (1,), (2,), (3,)]),
        # Experts are spread over the ranks of a context group, too.
        (Mesh(replicate=2, context=2, expert=2), [(0, 2), (1, 3)]),
        (Mesh(pipeline=2, replicate=2, shard=2), [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ],
)
def test_ranks_with_the_same_part_of_a_model(mesh: Mesh, alike: list[tuple[int, ...]]) -> None:
    found: dict[object, list[int]] = {}
    for rank in range(mesh.world_size):
        found.setdefault(mesh.part(rank), []).append(rank)
    assert [tuple(ranks) for ranks in found.values()] == alike


def test_pods_that_share_sequences_are_placed_together() -> None:
    assert Mesh(replicate=2, context=2).pods_together(1) == (0, 0, 1, 1)
    assert Mesh(replicate=2, context=2).pods_together(2) == (0, 0)
