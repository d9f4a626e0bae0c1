"""What a rank asks of torch where it has a GPU, shown without one.

Fake tensors stand for those of a GPU, and torch's own calls are noted where they need a driver: without one torch pins
no memory and has no streams. That it works is for tests/gpu to show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_api.compute import Precision
from disttrain_api.mesh import Mesh
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training
from disttrain_session import loader
from disttrain_session.loader import Loader
from disttrain_trainer.checkpoint.staging import HostCopier
from disttrain_trainer.checks.model_memory import _in_host
from disttrain_trainer.data.batches import moved
from disttrain_trainer.metrics.flops import peak_flops
from disttrain_trainer.parallel import data_parallel
from disttrain_trainer.parallel.sparse_gradients import what_takes_none
from disttrain_trainer.parallel.sync_batch_norm import synchronise_batch_norm
from disttrain_trainer.parameter_server.worker import staging
from disttrain_trainer.parameter_server.worker.staging import PastEvent, Staging
from disttrain_trainer.protocols import Mean
from disttrain_trainer.runtime.device import GLOO, NCCL, CopyStream, Device, current, find_device
from disttrain_trainer.tasks.figures import Figures
from tests.unit.trainer.worlds import small

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


class Noted(TorchFunctionMode):
    """Notes which calls want pinned memory, and which do not wait; without a driver the first are made without it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []

    def __torch_function__(
        self, function: Any, types: object, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options = options or {}
        name = getattr(function, "__name__", "")
        if name == "pin_memory":
            self.calls.append(("pin_memory", str(arguments[0].device)))
            return arguments[0]
        for option in ("pin_memory", "non_blocking"):
            if option in options:
                self.calls.append((name, options[option]))
        return function(*arguments, **options)


@pytest.fixture
def noted() -> Iterator[Noted]:
    with FakeTensorMode(), Noted() as noted:
        yield noted


def test_a_batch_goes_to_a_gpu_through_pinned_memory_and_nobody_waits(noted: Noted) -> None:
    batch = {"there": torch.ones(2, device=GPU), "here": torch.ones(2), "name": "x"}
    found = moved(batch, GPU)
    assert [found["there"].device, found["here"].device] == [GPU, GPU]
    assert noted.calls == [("pin_memory", "cpu"), ("to", True)]
    noted.calls.clear()
    assert moved({"here": torch.ones(2)}, CPU)["here"].device == CPU
    assert noted.calls == []


def test_so_does_a_batch_of_a_session(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = SimpleNamespace(rank=0, size=1, device=Device(GPU, NCCL))
    # The real one draws a seed, which a fake tensor does not have.
    monkeypatch.setattr(loader, "DataLoader", lambda *_, **__: [(torch.ones(4, 2), ["x"] * 4)])
    batches = Loader("data", 4, world, lambda: False, seed=0, shuffle=True, num_workers=0, collate_fn=None)
    values, names = next(batches)
    assert (values.device, names) == (GPU, ["x"] * 4)
    assert noted.calls == [("pin_memory", "cpu"), ("to", True)]


class Copies(TorchDispatchMode):
    """Notes what is copied from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_dispatch__(
        self, function: Any, types: object, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default and "device" in (options or {}):
            self.found.append(arguments[0].device)
        return function(*arguments, **(options or {}))


def test_figures_of_a_batch_are_added_where_they_are() -> None:
    figures = Figures()
    with FakeTensorMode(), Copies() as copies:
        for _ in range(2):
            figures.add({"loss": Mean(torch.ones((), device=GPU), 3.0)})
    assert copies.found == []


def test_a_copy_of_a_gpus_state_is_complete_when_given(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: noted.calls.append(("synchronize", device)))
    copier, value = HostCopier(Device(GPU, NCCL)), torch.ones(2, device=GPU)
    first = copier.copy({"model": {"weight": value}, "step": 3})
    assert first["model"]["weight"].device == CPU
    assert noted.calls == [("empty", True), ("copy_", True), ("synchronize", GPU)]
    noted.calls.clear()
    second = copier.copy({"model": {"weight": value}, "step": 4})
    assert second["model"]["weight"] is first["model"]["weight"], "pinned memory is dear to make"
    assert noted.calls == [("copy_", True), ("synchronize", GPU)]
    assert second["step"] == 4


def test_on_a_cpu_none_is_pinned(noted: Noted) -> None:
    HostCopier(Device(CPU, "gloo")).copy({"weight": torch.ones(2)})
    assert noted.calls == [("empty", False), ("copy_", False)]


def test_a_copy_waits_for_what_computes_its_value_and_keeps_the_value_until_then(noted, monkeypatch):
    calls = noted.calls
    stream = SimpleNamespace(
        wait_stream=lambda other: calls.append(("wait_stream", other)), record_event=lambda: "all so far"
    )

    @contextmanager
    def inside(chosen: object) -> Iterator[None]:
        calls.append(("inside", chosen is stream))
        yield
        calls.append(("outside", True))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that which computes on {device}")
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(Tensor, "record_stream", lambda _, kept_by: calls.append(("record_stream", kept_by)))
    copies = CopyStream(GPU)
    copies.copy(torch.ones(2, device=GPU), torch.ones(2))
    assert calls == [
        ("wait_stream", "that which computes on cuda:0"),
        ("inside", True),
        ("copy_", True),
        ("outside", True),
        ("record_stream", stream),
    ]
    assert copies.record_event() == "all so far"


class FakeStream:
    """Copies at once; its events are numbers of copies."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.copies = device, 0

    def copy(self, value: Tensor, buffer: Tensor) -> None:
        buffer.copy_(value)
        self.copies += 1

    def record_event(self) -> int:
        return self.copies


def test_a_push_has_one_pinned_buffer_for_each_place(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CopyStream", FakeStream)
    place = Staging()
    own = torch.ones(3)
    assert place.down("on the host", own) is own
    assert isinstance(place.record_event(), PastEvent)
    first = place.down("a", torch.ones(3, device=GPU))
    assert (first.device, place.record_event()) == (CPU, 1)
    assert place.down("a", torch.ones(3, device=GPU)) is first
    assert place.down("b", torch.ones(3, device=GPU)) is not first
    assert place.down("a", torch.ones(4, device=GPU)).shape == (4,)
    assert place.record_event() == 4
    assert noted.calls == [("empty", True)] * 3


@pytest.fixture
def one() -> Iterator[Any]:
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("replicate",))
    dist.destroy_process_group()


def test_on_gpus_torchs_own_layer_takes_the_place_of_batch_norm(one: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    names, weight = list(model.state_dict()), model[1].weight
    found = synchronise_batch_norm(model, SimpleNamespace(device=Device(GPU, NCCL), device_mesh=one))
    assert type(found[1]) is nn.SyncBatchNorm
    assert found[1].process_group is one.get_group()
    assert list(found.state_dict()) == names
    assert found[1].weight is weight


class Replica:
    """Notes what DDP is given."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.options = options


@pytest.mark.parametrize(("device", "ids"), [(Device(GPU, NCCL), [GPU]), (Device(CPU, "gloo"), [])])
def test_replicas_name_gpus(one: Any, monkeypatch: pytest.MonkeyPatch, device: Device, ids: list[torch.device]) -> None:
    monkeypatch.setattr(data_parallel, "DistributedDataParallel", Replica)
    world: Any = SimpleNamespace(device=device, parts=2, device_mesh=one)
    assert data_parallel.replicate(nn.Linear(2, 2), world).options["device_ids"] == ids


GIB = 2**30
LEAST = SimpleNamespace(whole=GIB, of_ranks=lambda ranks: 4 * ranks * GIB)


@pytest.mark.parametrize(("device", "offloaded", "gib"), [(GPU, False, 1), (GPU, True, 8), (CPU, False, 8)])
def test_models_for_gpus_take_the_hosts_memory_while_built(device: torch.device, offloaded: bool, gib: int) -> None:
    training = Training.model_validate(small(offload={"parameters": offloaded}))
    config: Any = SimpleNamespace(training=training)
    world: Any = SimpleNamespace(device=Device(device, NCCL if device == GPU else "gloo"))
    assert _in_host(LEAST, config, world, 2) == gib * GIB


@pytest.mark.parametrize(
    ("device", "replicas", "taker"),
    [(Device(GPU, NCCL), 2, "NCCL"), (Device(GPU, NCCL), 1, None), (Device(GPU, GLOO), 2, None)],
)
def test_replicas_on_gpus_of_their_own_sum_nothing_sparse(device: Device, replicas: int, taker: str | None) -> None:
    parallelism = Parallelism()
    training = Training.model_validate(small())
    config: Any = SimpleNamespace(training=training, job=SimpleNamespace(parallelism=parallelism))
    world: Any = SimpleNamespace(device=device, parts=replicas, mesh=Mesh.of(parallelism, replicas))
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert what_takes_none(config, world, optimizer) == taker


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with four GPUs, which computes nothing."""
    made = SimpleNamespace(chosen=[], waited=[], name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", made.chosen.append)
    monkeypatch.setattr(torch.cuda, "synchronize", made.waited.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: made.name)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 3 * 2**30)
    return made


def test_a_rank_computes_on_its_own_gpu(machine: SimpleNamespace) -> None:
    second = torch.device("cuda", 2)
    assert find_device(1, 2, threads_given=False, devices=2) == Device(second, NCCL)
    assert machine.chosen == [second]
    assert find_device(4, 5, threads_given=False) == Device(GPU, GLOO), "the fifth rank shares the first GPU"
    threads = torch.get_num_threads()
    find_device(0, 64, threads_given=False)
    assert torch.get_num_threads() == threads, "ranks on GPUs leave the threads of the host alone"


def test_several_devices_of_a_rank_are_neighbours(machine: SimpleNamespace) -> None:
    last = Device(torch.device("cuda", 3), NCCL)
    assert [device.index for device in last.neighbours(3)] == [3, 0, 1]
    assert Device(CPU, "gloo").neighbours(2) == [CPU, CPU]


def test_figures_of_a_gpu_come_from_its_driver(machine: SimpleNamespace) -> None:
    device = Device(GPU, NCCL)
    device.synchronize()
    assert machine.waited == [GPU]
    assert device.memory() == ("memory/max_reserved(GiB)", 3.0)
    peak = peak_flops(machine.name)
    assert peak is not None
    assert [device.peak_flops(one) for one in Precision] == [
        {Precision.FP32: None, Precision.TF32: peak / 2}.get(one, peak) for one in Precision
    ]
    machine.name = "a GPU of tomorrow"
    assert device.peak_flops(Precision.TF32) is None
    Device(CPU, "gloo").synchronize()
    assert machine.waited == [GPU]


class FakeEvent:
    """A moment of a GPU: the number of those before it, in milliseconds."""

    made = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.made = FakeEvent.made + 1

    def elapsed_time(self, later: FakeEvent) -> float:
        return float(later.at - self.at)


def test_time_on_a_gpu_is_that_between_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    device = Device(GPU, NCCL)
    assert device.seconds(device.mark(), device.mark()) == 1e-3


def test_what_a_thread_computes_for_a_device_it_computes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda device: f"inside {device}")
    assert current(GPU) == "inside cuda:0"
    with current(CPU):
        pass
