"""All differences between a CPU and a CUDA rank."""

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from disttrain_api.compute import Attention, Float8Recipe, Precision
from disttrain_trainer.metrics.flops import peak_flops
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.host_limits import cores

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
Span = tuple[Mark, Mark]
"""From one moment to a later one."""

GPU_KERNELS = "CUDA"
"""torch's dispatch key of tensors on GPUs."""

GPU_RANDOM_STATE = "cuda"
"""Name of a GPU's random state in a checkpoint."""


@dataclass(frozen=True)
class Device:
    """Device of this rank, and the backend of its process groups."""

    torch: TorchDevice
    backend: str

    @property
    def kind(self) -> str:
        """ "cpu" or "cuda"."""
        return self.torch.type

    @property
    def computes_on_host(self) -> bool:
        """Whether parameters, gradients and optimizer state lie in the host's memory."""
        return self.kind == "cpu"

    @property
    def shares_gpu(self) -> bool:
        """Whether ranks compute on one GPU together, and so talk through gloo."""
        return self.kind == "cuda" and self.backend == GLOO

    @property
    def channel(self) -> TorchDevice:
        """Device from which tensors are sent to other ranks."""
        return channel_of(self.torch, self.backend)

    @property
    def sums_sparse(self) -> bool:
        """Whether ranks sum sparse tensors: gloo does, NCCL does not."""
        return self.backend != NCCL

    @property
    def message_bytes(self) -> int:
        """Enough to see a link's speed and not its latency alone: 1 MiB, on GPUs, whose links are faster, 16 MiB."""
        return 2**24 if self.kind == "cuda" else 2**20

    @property
    def has_sync_batch_norm(self) -> bool:
        """Whether torch's own nn.SyncBatchNorm computes here; it knows GPUs alone."""
        return self.kind == "cuda"

    def emulates_float8(self, recipe: Float8Recipe) -> bool:
        """Whether products in FP8 are computed as rounded ones in BF16: on a CPU. Raises InvalidConfiguration for a GPU
        that has none."""
        if self.kind == "cpu":
            return True
        needed = (8, 9) if recipe is Float8Recipe.TENSORWISE else (9, 0)
        found = torch.cuda.get_device_capability(self.torch)
        if found < needed:
            name = torch.cuda.get_device_name(self.torch)
            raise InvalidConfiguration(
                f"`training.float8` {recipe.value} needs a GPU of compute capability {needed[0]}.{needed[1]} or later, "
                f"the {name} has {found[0]}.{found[1]}: remove it"
            )
        return False

    def emulates_overlap(self, place: int, count: int) -> bool:
        """Whether products do not overlap with what a group of `count` neighbours sends: on a CPU. Raises
        InvalidConfiguration for a GPU that does not reach the memory of the others. place: of this one in the group."""
        if self.kind == "cpu":
            return True
        field = "`parallelism.asyncTensorParallel`"
        if self.shares_gpu:
            raise InvalidConfiguration(f"{field} needs a GPU for each rank: remove it, or start fewer ranks")
        first = self.torch.index - place
        # Whoever sees its own GPU alone finds out when it first computes.
        for other in range(max(0, first), min(first + count, torch.cuda.device_count())):
            if other != self.torch.index and not torch.cuda.can_device_access_peer(self.torch.index, other):
                raise InvalidConfiguration(
                    f"{field}: GPU {self.torch.index} does not reach the memory of GPU {other} of its tensor group "
                    "(`nvidia-smi topo -p2p r` shows which do): remove it"
                )
        return False

    def use_attention(self, kernel: Attention | None, precision: Precision) -> None:
        """Have torch's scaled_dot_product_attention computed by this kernel alone, in the whole process; None: torch
        chooses. Raises InvalidConfiguration where the device has none of them for this precision."""
        if kernel is not None and self.kind == "cpu" and kernel not in (Attention.FLASH, Attention.MATH):
            raise InvalidConfiguration(f"`training.attention` {kernel} needs a GPU: a CPU has Flash and Math")
        in_halves = precision in (Precision.BF16, Precision.FP16)
        if self.kind != "cpu" and kernel in (Attention.FLASH, Attention.CUDNN) and not in_halves:
            raise InvalidConfiguration(
                f"`training.attention` {kernel} computes in BF16 or FP16, and `training.precision` is {precision}: "
                "change it, or use Efficient or Math"
            )
        allow_attention(kernel)

    @property
    def activities(self) -> list[ProfilerActivity]:
        """Return the activities to trace."""
        return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.kind == "cuda" else [])]

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

    def seconds_of_both(self, host: float, device: float) -> float:
        """Until both are done: a GPU computes while the host prepares what comes next, and a CPU does one of them."""
        return host + device if self.computes_on_host else max(host, device)

    def peak_flops(self, precision: Precision) -> float | None:
        """FLOP/s in this precision; None where it is not known: on CPUs, and in FP32, whose peak settings decide."""
        if self.kind != "cuda" or precision is Precision.FP32:
            return None
        peak = peak_flops(torch.cuda.get_device_name(self.torch))
        # Tensor cores multiply half as many numbers of 19 bits as of 16.
        return peak / 2 if peak is not None and precision is Precision.TF32 else peak

    def memory(self) -> tuple[str, float]:
        """Key and GiB of the most memory used so far: of the GPU, on a CPU of the process."""
        if self.kind == "cuda":
            return "memory/max_reserved(GiB)", torch.cuda.max_memory_reserved(self.torch) / _GIB
        # Linux counts ru_maxrss in KiB.
        return "memory/max_resident(GiB)", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    @contextmanager
    def snapshot_when_full(self, path: Path) -> Iterator[None]:
        """If GPU memory runs out inside the context, write a snapshot of its use to `path`; does nothing on a CPU."""
        if self.kind != "cuda":
            yield
            return
        torch.cuda.memory._record_memory_history()
        try:
            yield
        except torch.OutOfMemoryError:
            torch.cuda.memory._dump_snapshot(str(path))
            raise
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def find_device(local_rank: int, local_world_size: int, threads_given: bool, devices: int = 1) -> Device:
    """The GPU of this local rank, the first of its `devices`; or the CPU, with this rank's share of its container."""
    if torch.cuda.is_available():
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", gpu_of(local_rank, devices, gpus))
        torch.cuda.set_device(device)
        return Device(device, backend_of_gpus(local_world_size, devices, gpus))
    if not threads_given:
        torch.set_num_threads(max(1, cores() // local_world_size))
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
    """Return the device from which tensors are sent: gloo sends only from host memory.

    Its collectives take tensors on GPUs and copy them by themselves. backend: as torch writes it, "DEVICE:NAME,...".
    """
    return device if f"{device.type}:nccl" in backend.split(",") else torch.device("cpu")


def in_host_memory(values: Tensor) -> bool:
    """Whether the values lie there, and not in a GPU's."""
    return values.device.type == "cpu"


def allow_attention(kernel: Attention | None) -> None:
    """Allow torch's scaled_dot_product_attention this kernel alone, in the whole process; None: all of them."""
    kernels = torch.backends.cuda
    switches = {
        Attention.FLASH: kernels.enable_flash_sdp,
        Attention.CUDNN: kernels.enable_cudnn_sdp,
        Attention.EFFICIENT: kernels.enable_mem_efficient_sdp,
        Attention.MATH: kernels.enable_math_sdp,
    }
    for one, switch in switches.items():
        switch(kernel is None or one is kernel)


def allows_flash_attention() -> bool:
    """Whether attention may be computed without score matrices, by `allow_attention`."""
    return torch.backends.cuda.flash_sdp_enabled()


def takes_flash_attention(query: Tensor) -> bool:
    """Whether torch's flash attention for GPUs computes such queries [B, H, T, D'], with keys and values like them."""
    causal = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, True, False)
    # torch's own function widens the heads of others before it calls the kernel.
    return query.shape[-1] % 8 == 0 and torch.backends.cuda.can_use_flash_attention(causal)


def pins_memory(device: torch.device) -> bool:
    """Whether copies between host and device are to use pinned memory: those of a GPU then run beside its work."""
    return device.type == "cuda"


def fuses_updates(device: torch.device) -> bool:
    """Whether optimizers can step all parameters there in one kernel instead of some for each operation."""
    return device.type in ("cuda", "cpu")


def gpus_of(device: torch.device) -> list[torch.device]:
    """The device where it is a GPU, else none: for what in torch takes GPUs alone, as CPUs need no word."""
    return [device] if device.type == "cuda" else []


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make this the current device of the thread inside the context."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu_random_state() -> dict[str, Tensor]:
    """The random state of this process's GPU, by its name in a checkpoint; empty where it has none."""
    return {GPU_RANDOM_STATE: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}


def restore_gpu_random_state(state: Mapping[str, Tensor]) -> None:
    """The opposite of `gpu_random_state`; nothing to do where the state is of no GPU, or there is none here."""
    if GPU_RANDOM_STATE in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[GPU_RANDOM_STATE])


class CopyStream:
    """Copies from a GPU into pinned memory. Not in the stream that computes: the rest of a backward pass would wait."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def copy(self, value: Tensor, buffer: Tensor) -> None:
        """Have the value, once it is computed, copied into the buffer."""
        self._stream.wait_stream(torch.cuda.current_stream(value.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(value.detach(), non_blocking=True)
        value.record_stream(self._stream)

    def record_event(self) -> torch.cuda.Event:
        """The moment at which all copies so far are complete."""
        return self._stream.record_event()
