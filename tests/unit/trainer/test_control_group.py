"""The few numbers of each step do not wait behind activations and gradients: with gloo they have their own group."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from disttrain_api.mesh import Mesh
from disttrain_trainer.parallel.gradient_norm import total_norm
from disttrain_trainer.runtime import mesh
from disttrain_trainer.runtime.device import GLOO, NCCL, Device


@pytest.fixture
def sums(monkeypatch):
    """Groups over which numbers were summed."""
    groups = []

    def all_reduce(_, group=None, **__):
        groups.append(group)
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return groups


@pytest.fixture
def joined(monkeypatch):
    """Return a function that joins a world of `ranks` with the backend."""
    monkeypatch.setattr(mesh, "_rendezvous", lambda _: None)
    monkeypatch.setattr(mesh, "restrict_unpickling", lambda: None)
    monkeypatch.setattr(mesh, "device_mesh_of", lambda *_: None)
    monkeypatch.setattr(mesh, "context_group_of", lambda _: None)
    monkeypatch.setattr(mesh, "output_index", lambda _: 0)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: (backend, timeout))

    def join(ranks, backend):
        config = SimpleNamespace(
            rank=0,
            world_size=ranks,
            timeout=timedelta(minutes=1),
            saves_in_background=False,
            mesh=Mesh(pipeline=ranks),
            job=SimpleNamespace(parallelism=None),
        )
        return mesh.join_world(config, Device(torch.device("cpu"), backend))

    return join


@pytest.mark.parametrize(
    ("ranks", "backend", "group"), [(2, GLOO, (GLOO, timedelta(minutes=1))), (2, NCCL, None), (1, GLOO, None)]
)
def test_counts_and_the_norm_have_a_group_of_their_own_where_gloo_sends_activations_too(
    joined, sums, ranks, backend, group
):
    world = joined(ranks, backend)
    world.sum_later(1.0)()
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    total_norm([parameter], world)
    assert sums == [group] * (2 if ranks > 1 else 1)
