"""What differs between ranks on CPUs and on GPUs; no GPU is needed to decide."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity

from disttrain_trainer.parallel.pipeline.stages import StageBetween
from disttrain_trainer.runtime.device import (
    GLOO,
    NCCL,
    Device,
    backend_of_gpus,
    channel_of,
    gpu_of,
    gpus_of,
    in_host_memory,
    pins_memory,
)
from disttrain_trainer.runtime.randomness import random_state, restore_random_state

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "devices", "gpus", "backend"),
    [
        (1, 1, 1, NCCL),
        (8, 1, 8, NCCL),
        (2, 1, 1, GLOO),
        (4, 1, 2, GLOO),
        (3, 1, 2, GLOO),
        (2, 2, 4, NCCL),
        (4, 2, 4, GLOO),
        # One rank whose devices are the same GPU talks to nobody on it.
        (1, 5, 1, NCCL),
    ],
)
def test_ranks_that_share_a_gpu_go_through_gloo(ranks, devices, gpus, backend):
    assert backend_of_gpus(ranks, devices, gpus) == backend


@pytest.mark.parametrize(("error", "written"), [(torch.OutOfMemoryError, True), (ValueError, False), (None, False)])
def test_only_where_memory_runs_out_is_it_written_what_it_was_used_for(monkeypatch, tmp_path, error, written):
    path, recording = tmp_path / "memory.pickle", []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled="all": recording.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda file: Path(file).touch())
    with nullcontext() if error is None else pytest.raises(error), Device(GPU, NCCL).snapshot_when_full(path):
        if error is not None:
            raise error
    assert path.exists() == written
    assert recording == ["all", None], "recorded while it runs, and not after"


def test_ranks_beyond_the_last_gpu_begin_anew():
    assert [gpu_of(rank, devices=1, gpus=2) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [gpu_of(rank, devices=2, gpus=4) for rank in range(3)] == [0, 2, 0]


@pytest.mark.parametrize(
    ("device", "backend", "channel"),
    [(GPU, NCCL, GPU), (GPU, GLOO, CPU), (CPU, NCCL, CPU), (CPU, GLOO, CPU), (CPU, "cpu:gloo", CPU)],
)
def test_gloo_sends_from_the_hosts_memory(device, backend, channel):
    assert channel_of(device, backend) == channel


def test_only_ranks_on_one_gpu_get_a_warning():
    assert Device(GPU, GLOO).shares_gpu
    assert not Device(GPU, NCCL).shares_gpu
    assert not Device(CPU, "gloo").shares_gpu


@pytest.mark.parametrize(("device", "leave"), [("meta", "meta"), ("cpu", "meta")])
def test_a_stage_takes_its_inputs_to_its_device_and_its_outputs_away(device, leave):
    # Tensors on "meta" stand for those of another device: they have sizes alone.
    stage = StageBetween([nn.Linear(2, 3, device=device)], (), torch.device(device), torch.device(leave))
    seen = []
    stage.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].device.type))
    assert stage(torch.ones(4, 2)).device.type == leave
    assert seen == [device]


def test_what_a_gpu_is_given_and_a_cpu_needs_not():
    assert (gpus_of(GPU), gpus_of(CPU)) == ([GPU], [])
    assert (pins_memory(GPU), pins_memory(CPU)) == (True, False)
    with FakeTensorMode():
        assert [in_host_memory(torch.empty(2, device=device)) for device in (GPU, CPU)] == [False, True]
    gpu, cpu = Device(GPU, NCCL), Device(CPU, "gloo")
    assert (gpu.has_sync_batch_norm, cpu.has_sync_batch_norm) == (True, False)
    assert set(gpu.activities) - set(cpu.activities) == {ProfilerActivity.CUDA}
    assert gpu.message_bytes > cpu.message_bytes


def test_the_random_state_of_a_gpu_is_kept_under_the_name_that_checkpoints_have(monkeypatch):
    without = random_state()
    assert without.keys() == {"python", "numpy", "torch"}
    gpu, restored = torch.arange(3), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    assert random_state()["cuda"] is gpu
    restore_random_state(without)
    assert restored == []
    restore_random_state({**without, "cuda": gpu})
    assert restored == [gpu]


@pytest.mark.parametrize(("device", "backend", "sums"), [(CPU, "gloo", True), (GPU, GLOO, True), (GPU, NCCL, False)])
def test_gloo_alone_sums_sparse_tensors(device, backend, sums):
    assert Device(device, backend).sums_sparse is sums
