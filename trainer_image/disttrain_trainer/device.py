"""All differences between a CPU and a CUDA rank."""

import os
import resource
import time
from dataclasses import dataclass

import torch

from disttrain_api.training import Precision
from disttrain_trainer.flops import peak_flops

# Within Device `torch` is a field.
TorchDevice = torch.device

_GIB = 2**30

# Collectives on CPU tensors always go through gloo: the few numbers that ranks agree on in each step never wait for a
# GPU.
NCCL = "cpu:gloo,cuda:nccl"
# Written out for both: of a plain "gloo" torch makes groups with NCCL for GPUs (DeviceMesh).
GLOO = "cpu:gloo,cuda:gloo"

Mark = float | torch.cuda.Event
"""A moment in the work of a device."""


@dataclass(frozen=True)
class Device:
    """Where this rank computes, and what its process groups use."""

    torch: TorchDevice
    backend: str

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.torch.type

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks compute on one GPU together, and so talk through gloo."""
        return self.kind == "cuda" and self.backend == GLOO

    @property
    def channel(self) -> TorchDevice:
        """Where a tensor must lie to be sent from one rank to another."""
        return channel_of(self.torch, self.backend)

    def neighbours(self, count: int) -> list[TorchDevice]:
        """This device and the next ones, `count` in all; on a CPU logical ones, which are the CPU."""
        if self.kind == "cpu":
            return [self.torch] * count
        return [torch.device(self.kind, (self.torch.index + step) % torch.cuda.device_count()) for step in range(count)]

    def synchronize(self) -> None:
        """Wait until the device has done what it was given; a CPU always has."""
        if self.kind == "cuda":
            torch.cuda.synchronize(self.torch)

    def mark(self) -> Mark:
        """The moment at which the device has done what it was given so far."""
        if self.kind == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Between two moments that are past (see `synchronize`)."""
        if isinstance(begin, float) or isinstance(end, float):
            return float(end) - float(begin)  # type: ignore[arg-type]
        return begin.elapsed_time(end) / 1000

    def peak_flops(self, precision: Precision) -> float | None:
        """FLOP/s in this precision; None where it is not known: on CPUs, and in FP32, whose peak settings decide."""
        if self.kind != "cuda" or precision is Precision.FP32:
            return None
        return peak_flops(torch.cuda.get_device_name(self.torch))

    def memory(self) -> tuple[str, float]:
        """Key and GiB of the most memory used so far: of the GPU, on a CPU of the process."""
        if self.kind == "cuda":
            return "memory/max_reserved(GiB)", torch.cuda.max_memory_reserved(self.torch) / _GIB
        # Linux counts ru_maxrss in KiB.
        return "memory/max_resident(GiB)", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def find_device(local_rank: int, local_world_size: int, threads_given: bool, devices: int = 1) -> Device:
    """The GPU of this local rank, the first of its `devices`; or the CPU with this rank's share of the cores."""
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", gpu_of(local_rank, devices, gpus))
        torch.cuda.set_device(device)
        return Device(device, backend_of_gpus(local_world_size, devices, gpus))
    if not threads_given:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    return Device(torch.device("cpu"), "gloo")


def gpu_of(local_rank: int, devices: int, gpus: int) -> int:
    """Index of the first of a local rank's `devices`; ranks beyond the last GPU begin anew at the first."""
    return local_rank * devices % gpus


def backend_of_gpus(local_world_size: int, devices: int, gpus: int) -> str:
    """NCCL; gloo where two ranks of a machine share a GPU, which NCCL refuses ("Duplicate GPU detected").

    Every machine of a job must have as many ranks per GPU as the others, so that all come to the same answer.
    """
    firsts = {gpu_of(local_rank, devices, gpus) for local_rank in range(local_world_size)}
    return NCCL if len(firsts) == local_world_size else GLOO


def channel_of(device: torch.device, backend: str) -> torch.device:
    """Where a tensor must lie to be sent from rank to rank: gloo's messages leave from the host's memory alone.

    Its collectives take tensors on GPUs and copy them by themselves. backend: as torch writes it, "DEVICE:NAME,...".
    """
    return device if f"{device.type}:nccl" in backend.split(",") else torch.device("cpu")
