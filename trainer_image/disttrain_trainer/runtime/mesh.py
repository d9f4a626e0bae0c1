"""The ranks of a job as process groups, and the few ways in which the trainer talks over them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Optional, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from disttrain_api.attempt_key import attempt_key
from disttrain_api.handshake import Refused
from disttrain_api.mesh import AXES, Mesh
from disttrain_api.pipeline import output_index
from disttrain_api.pod_address import is_loopback
from disttrain_trainer.runtime import json_collectives
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.device import GPU_KERNELS, NCCL, Device
from disttrain_trainer.runtime.errors import PeerLost, PortInUse, TrainerError, one_line
from disttrain_trainer.runtime.failures import Failure
from disttrain_trainer.runtime.host_collectives import use_host_for_collectives
from disttrain_trainer.runtime.hosts import stay_on_loopback
from disttrain_trainer.runtime.rendezvous.forwarder import Place
from disttrain_trainer.runtime.rendezvous.store import open_store
from disttrain_trainer.runtime.unpickler import restrict_unpickling

T = TypeVar("T")

PARTING_TIMEOUT = timedelta(seconds=10)


@dataclass(frozen=True)
class World:
    """This rank among the others."""

    rank: int
    size: int
    device: Device
    mesh: Mesh
    device_mesh: DeviceMesh
    """One dimension per axis of the mesh of parameters (Mesh.of_parameters) whose degree is above 1, and `shard`
    (parallel/sharded.py needs it)."""
    store: dist.Store
    output_index: int = 0
    """Pipeline index that has outputs and loss."""
    background: dist.ProcessGroup | None = None
    """All ranks once more, on gloo, for a thread beside the training loop: collectives of two threads must not meet in
    one group. None where nothing is saved in the background."""
    control: dist.ProcessGroup | None = None
    """All ranks once more, for the few numbers that they sum in each step; None: those go over the default group, which
    NCCL leaves to them. With gloo they would hold up the activations and gradients on the same connections."""
    context: dist.ProcessGroup | None = None
    """The ranks that compute parts of the same sequences; None where each rank computes whole ones."""

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which writes what is written once."""
        return self.rank == 0

    @cached_property
    def at(self) -> dict[str, int]:
        """Index of this rank along each axis of the mesh."""
        return self.mesh.coordinates(self.rank)

    @property
    def replicas(self) -> int:
        """Parts that a global batch is cut into."""
        return self.mesh.data_parallel

    @property
    def replica(self) -> int:
        """Index of this rank's part."""
        return self.at["replicate"] * self.mesh.shard + self.at["shard"]

    @property
    def parts(self) -> int:
        """Ranks with different tokens of a global batch, whose gradients are averaged."""
        return self.mesh.parts

    @property
    def part(self) -> int:
        """Index of this rank's tokens."""
        return self.replica * self.mesh.context + self.at["context"]

    @property
    def counts_replica(self) -> bool:
        """Whether this rank counts where each replica counts once: it is the first of those that have its outputs."""
        return self.counts_outputs and not self.at["context"]

    @property
    def counts_outputs(self) -> bool:
        """Whether this rank counts where each output counts once: it is the first of those that have its own."""
        return self.at["pipeline"] == self.output_index and self.computes_first

    @property
    def computes_first(self) -> bool:
        """Whether this rank counts where every layer of a replica counts once: it is the first to compute its own."""
        return not self.at["tensor"]

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks, in float64, by one small gloo all-reduce."""
        return self.sum_later(*numbers)()

    def sum_later(self, *numbers: float) -> Callable[[], list[float]]:
        """Start the sum and return a function that waits for its result."""
        values = torch.tensor(numbers, dtype=torch.float64)
        work = dist.all_reduce(values, group=self.control, async_op=True)

        def result() -> list[float]:
            if work is not None:
                work.wait()
            return values.tolist()

        return result

    def sum_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A CPU copy of `values` summed over all ranks in float64."""
        return self._all_reduce(values.detach().to("cpu", torch.float64), dist.ReduceOp.SUM)

    def max_tensor(self, values: torch.Tensor) -> torch.Tensor:
        """A CPU copy of `values`, the largest of all ranks, in float64."""
        return self._all_reduce(values.detach().to("cpu", torch.float64), dist.ReduceOp.MAX)

    def gather(self, value: T, kind: Any) -> list[T]:
        """`value` of every rank, in order of rank, on every rank. `kind`: its type (see json_collectives.py)."""
        return json_collectives.all_gather(value, kind)

    def from_first(self, work: Callable[[], T], kind: Any = None, group: dist.ProcessGroup | None = None) -> T:
        """The result of `work` on rank 0, on every rank; a TrainerError it raises is raised on every rank.

        `kind`: the type of the result (see json_collectives.py); None where there is none.
        """
        outcome: tuple[Failure | None, T | None] = (None, None)
        own: TrainerError | None = None
        if self.first:
            try:
                outcome = (None, work())
            except TrainerError as error:
                own, outcome = error, (Failure.of(error), None)
        failure, result = json_collectives.broadcast(outcome, tuple[Failure | None, Optional[kind]], group)  # noqa: UP045
        if failure is not None:
            raise _on_every_rank(failure, own)
        return result  # type: ignore[return-value]

    def all_or_none(self, work: Callable[[], None]) -> None:
        """`work` on every rank; a TrainerError that some rank raises is raised on every rank."""
        own: TrainerError | None = None
        try:
            work()
        except TrainerError as error:
            own = error
        for rank, found in enumerate(self.gather(own and Failure.of(own), Failure | None)):
            if found is not None:
                raise _on_every_rank(found, own if rank == self.rank else None)

    def leave(self) -> None:
        """Wait, but not for ever, until every rank is past its last collective. Rank 0, the store's host, goes last.

        Who leaves earlier resets connections that peers may still read from, and gloo then fails or aborts there.
        """
        others = range(1, self.size)
        with suppress(dist.DistError, RuntimeError):
            for stage, waiting in (("done", True), ("gone", self.first)):
                self.store.set(f"disttrain/{stage}/{self.rank}", "")
                # Its answer says that the store has read the line before: this process may now end.
                self.store.check([f"disttrain/{stage}/{self.rank}"])
                if waiting:
                    ranks = range(self.size) if stage == "done" else others
                    self.store.wait([f"disttrain/{stage}/{rank}" for rank in ranks], PARTING_TIMEOUT)

    @staticmethod
    def _all_reduce(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values, operation)
        return values


def join_world(config: Config, device: Device) -> World:
    """Meet the other ranks. Raises PortInUse on rank 0, PeerLost where the others do not come in time."""
    restrict_unpickling()
    try:
        # A lone rank needs no port, so any number of them can run on one machine.
        store = dist.HashStore() if config.world_size == 1 else _rendezvous(config)
        dist.init_process_group(
            device.backend, store=store, rank=config.rank, world_size=config.world_size, timeout=config.timeout
        )
    except (dist.DistError, RuntimeError, OSError, Refused) as error:
        raise _translate(config, error) from error
    background = dist.new_group(backend="gloo", timeout=config.timeout) if config.saves_in_background else None
    shared = device.backend != NCCL and config.world_size > 1
    control = dist.new_group(backend=device.backend, timeout=config.timeout) if shared else None
    mesh, context = device_mesh_of(config.mesh, device), context_group_of(config.mesh)
    output = output_index(config.job.parallelism)
    return World(config.rank, config.world_size, device, config.mesh, mesh, store, output, background, control, context)


def device_mesh_of(mesh: Mesh, device: Device) -> DeviceMesh:
    """torch's form of the mesh; a collective call of the whole world."""
    if device.shares_gpu:
        # torch uses these collectives to put the parts together of what is cut over a mesh.
        use_host_for_collectives(GPU_KERNELS)
    held = mesh.of_parameters
    shape = {axis: getattr(held, axis) for axis in AXES if axis == "shard" or getattr(held, axis) > 1}
    return init_device_mesh(device.kind, tuple(shape.values()), mesh_dim_names=tuple(shape))


def context_group_of(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return this rank's context group, None where it is alone in it; a collective call of the whole world."""
    if mesh.context == 1:
        return None
    own, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in mesh.groups("context")])
    return own


def _rendezvous(config: Config) -> dist.Store:
    """A file of the pod, or MASTER_ADDR and MASTER_PORT, which are tried again where the name does not resolve yet."""
    if config.store_file is not None:
        stay_on_loopback()
        config.store_file.parent.mkdir(parents=True, exist_ok=True)
        store = dist.FileStore(str(config.store_file), config.world_size)
        store.set_timeout(config.timeout)
        return store
    host, _, port = config.master.rpartition(":")
    if is_loopback(host):
        stay_on_loopback()
    key = None
    if config.token:
        key = attempt_key(config.token, "rendezvous", config.job.uid, config.attempt, config.generation)
    return open_store(Place(host.strip("[]"), int(port), config.rank, config.world_size, key), config.timeout)


def _on_every_rank(failure: Failure, own: TrainerError | None) -> Exception:
    """The error itself on the rank that had it: it knows where it was raised."""
    error = own or failure.error()
    if isinstance(error, TrainerError):
        error.on_every_rank = True
    return error


def _translate(config: Config, error: Exception) -> TrainerError:
    text = str(error)
    if (
        "EADDRINUSE" in text
        or getattr(error, "errno", None) == errno.EADDRINUSE
        or os.strerror(errno.EADDRINUSE).lower() in text.lower()
    ):
        return PortInUse(
            f"{config.master} (MASTER_ADDR:MASTER_PORT) belongs to another program on rank 0's machine; use a free port"
        )
    seconds = config.timeout.total_seconds()
    place = config.store_file or config.master
    return PeerLost(f"{config.world_size} ranks did not meet at {place} within {seconds:g} s: {one_line(error)}")
