"""A rank of a simulated world: its process groups send nothing, and there are no other ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_api.parallelism import AllReduce, CompressionName
from disttrain_api.pipeline import output_index
from disttrain_trainer.collectives.schedules import SCHEDULES
from disttrain_trainer.estimate.counter import SEND, WorkCounter
from disttrain_trainer.optim.precision import MixedPrecision
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.mesh import World, context_group_of, device_mesh_of

T = TypeVar("T")

FIRST_BUCKET_BYTES, BUCKET_BYTES = 2**20, 25 * 2**20
"""DDP's own: the first bucket is small, so that sending begins early."""


@dataclass(frozen=True)
class ImaginedWorld(World):
    """Every other rank is as this one."""

    def gather(self, value: T, kind: Any) -> list[T]:
        return [value] * self.size

    def from_first(self, work: Callable[[], T], kind: Any = None, group: dist.ProcessGroup | None = None) -> T:
        return work()

    def all_or_none(self, work: Callable[[], None]) -> None:
        work()


@contextmanager
def imagined_world(config: Config) -> Iterator[ImaginedWorld]:
    """The world of `config`, of any size, of which only this rank exists. One at a time in a process."""
    device, store = Device(torch.device("cpu"), "fake"), FakeStore()
    dist.init_process_group("fake", store=store, rank=config.rank, world_size=config.world_size)
    try:
        mesh, context = device_mesh_of(config.mesh, device), context_group_of(config.mesh)
        output = output_index(config.job.parallelism)
        yield ImaginedWorld(config.rank, config.world_size, device, config.mesh, mesh, store, output, context=context)
    finally:
        dist.destroy_process_group()


class Buckets:
    """What DDP holds and sends: buckets, from the first step to the last, in which averaged gradients lie.

    DDP itself reads the values of tensors, which those of FakeTensorMode do not have.
    """

    def __init__(self, counter: WorkCounter, algorithm: AllReduce = AllReduce.BACKEND) -> None:
        self._tensors: list[torch.Tensor] = []
        self.averaging = False
        """Whether the next backward pass averages; what others leave lies outside the buckets until then."""
        self._counter, self._algorithm = counter, algorithm
        self._ranks: tuple[int, ...] = ()
        self._index = 0
        self._pending, self._limit = 0, FIRST_BUCKET_BYTES
        self._buffers = 0

    def average(self, module: nn.Module, world: World) -> nn.Module:
        """The module, its gradients kept in buckets from each backward pass on; see `parallelise`."""
        if world.parts > 1:
            self._ranks = tuple(dist.get_process_group_ranks(world.device_mesh.get_group("replicate")))
            self._index = self._ranks.index(world.rank)
            self._buffers = sum(buffer.nbytes for buffer in module.buffers())
            self._prepare([parameter for parameter in module.parameters() if parameter.requires_grad], world)
        return module

    def begin(self) -> None:
        """Make what the step before leaves."""

    def held(self) -> Iterator[torch.Tensor]:
        """Yield what is there from one step to the next."""
        yield from self._tensors

    def end_pass(self) -> None:
        """Count what the last bucket sends, and the buffers, which DDP shares once in a step."""
        self._finish()
        if self.averaging and self._buffers:
            self._counter.add("broadcast", self._ranks, self._buffers)

    def _prepare(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._bucket_of(parameter))

    def _finish(self) -> None:
        """Send what is left."""
        if self._pending:
            self._send()
        self._limit = FIRST_BUCKET_BYTES

    def _bucket_of(self, parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        bucket = torch.empty_like(parameter, requires_grad=False)
        self._tensors.append(bucket)

        def put(found: torch.Tensor) -> None:
            if self.averaging:
                found.grad = bucket
                self._pending += bucket.nbytes
                if self._pending >= self._limit:
                    self._send()

        return put

    def _send(self) -> None:
        if self._algorithm is AllReduce.BACKEND:
            self._counter.add("all-reduce", self._ranks, self._pending)
        else:
            schedule = SCHEDULES[self._algorithm](len(self._ranks))
            # In whole bytes: its parts are as equal as numbers of four bytes are, but for some bytes.
            sent = schedule.sent(self._index, self._pending, 1)
            self._counter.add(SEND, self._ranks, sent, len(schedule.rounds))
        self._pending, self._limit = 0, BUCKET_BYTES


def all_at_first(config: Config) -> bool:
    """Whether the first step sends all numbers of the gradients with their places, and later ones few."""
    compression = config.job.parallelism.data_parallel.compression
    if compression is None or not compression.warmup_steps:
        return False
    return compression.name in (CompressionName.TOP_K, CompressionName.RANDOM_K)


class ValuesOfOne(TorchDispatchMode):
    """Inside, a tensor's value that is asked for is 1: for optimizers that compute numbers of it, as Adafactor does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        return func(*args, **(kwargs or {}))


class WatchedPrecision(MixedPrecision):
    """The same formats; tells when a forward and a backward pass are over, and steps the optimizer whatever values
    are."""

    def __init__(
        self, like: MixedPrecision, forward_done: Callable[[], None], backward_done: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(like.device, like.format, like.scaler)
        object.__setattr__(self, "forward_done", forward_done)
        object.__setattr__(self, "backward_done", backward_done)

    def backward(self, loss: torch.Tensor) -> None:
        self.forward_done()  # type: ignore[attr-defined]
        super().backward(loss)
        self.backward_done()  # type: ignore[attr-defined]

    def update(self, optimizer: torch.optim.Optimizer, norm: Callable[[], torch.Tensor] | None) -> None:
        with ValuesOfOne():
            optimizer.step()
