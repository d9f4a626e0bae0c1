"""All differences between a CPU and a CUDA rank."""

import os
import resource
import time
from dataclasses import dataclass

import torch

from disttrain_api.training import Precision
from disttrain_trainer.flops import peak_flops

_GIB = 2**30

Mark = float | torch.cuda.Event
"""A moment in the work of a device."""


@dataclass(frozen=True)
class Device:
    """Where this rank computes, and what its process groups use."""

    torch: torch.device
    backend: str

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.torch.type

    def neighbours(self, count: int) -> list[torch.device]:
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
    """The GPU of this local rank, the first of its `devices`; or the CPU with this rank's share of the cores.

    Collectives on CPU tensors always go through gloo: the few numbers that ranks agree on in each step never wait for
    a GPU.
    """
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank * devices % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return Device(device, "cpu:gloo,cuda:nccl")
    if not threads_given:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
    return Device(torch.device("cpu"), "gloo")
