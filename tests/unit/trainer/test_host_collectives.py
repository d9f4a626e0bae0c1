"""Functional collectives by way of the host's memory are torch's own, operation by operation and in whole layouts."""

import json

import pytest
import torch

from disttrain_api.mesh import Mesh
from disttrain_trainer.runtime import mesh
from disttrain_trainer.runtime.device import GLOO, GPU_KERNELS, NCCL, Device
from disttrain_trainer.runtime.host_collectives import IN_PLACE, INTO, OPERATIONS
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.layouts import ALL_LAYOUTS, TRAININGS
from tests.unit.trainer.worlds import run_cases, run_ranks

MODULE = "tests.unit.trainer.host_rank"
NAMES = ["tp2, AdamW, accumulated", "tp2, sequence", "tp2, vocabulary", "fsdp2 + ep2"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    ended = run_ranks(folder, None, 2, module=MODULE, RESULTS=str(folder))
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_gives_what_torchs_own_gives(compared, name):
    for rank in compared:
        (expected, expected_given, _), (found, given, same) = rank[name]
        assert len(found) == len(expected) > 0
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert all(torch.equal(one, other) for one, other in zip(given, expected_given, strict=True))
        # So that what is written into is what the caller holds, and what is not is left alone.
        assert set(same) == {name in IN_PLACE + INTO}


def test_ranks_bring_along_different_numbers(compared):
    first, second = (rank["all_to_all_single"][1][0][0] for rank in compared)
    assert not torch.equal(first[:1], second[:1])


@pytest.fixture(scope="module")
def layouts(asked_for):
    return {name: ALL_LAYOUTS[name] for name in NAMES if name in asked_for("test_host_collectives", "layout")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory, layouts):
    cases = {training: [{"training": TRAININGS[training]}] for _, training, _, _ in layouts.values()}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases)


@pytest.fixture(scope="module")
def together(tmp_path_factory, layouts):
    cases = {
        name: [{"training": {**TRAININGS[training], **changes}, "parallelism": parallelism}]
        for name, (_, training, parallelism, changes) in layouts.items()
    }
    folder = tmp_path_factory.mktemp("together")
    found = run_cases(folder, 2, cases, module=MODULE)
    called = [json.loads((folder / f"called-{rank}.json").read_text()) for rank in range(2)]
    return found, called


@pytest.mark.parametrize("layout", NAMES)
def test_a_layout_equals_one_process(alone, together, layout):
    found = together[0][layout]
    assert found["errors"] == [None]
    require_same(found["parameters"], alone[ALL_LAYOUTS[layout][1]]["parameters"])


def test_these_layouts_do_use_them(together):
    for called in together[1]:
        assert {"all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"} <= set(called)


@pytest.mark.parametrize(
    ("kind", "backend", "expected"), [("cuda", GLOO, [GPU_KERNELS]), ("cuda", NCCL, []), ("cpu", "gloo", [])]
)
def test_only_ranks_that_share_a_gpu_take_this_way(monkeypatch, kind, backend, expected):
    used = []
    monkeypatch.setattr(mesh, "use_host_for_collectives", used.append)
    monkeypatch.setattr(mesh, "init_device_mesh", lambda *arguments, **options: None)
    mesh.device_mesh_of(Mesh(replicate=2), Device(torch.device(kind), backend))
    assert used == expected
