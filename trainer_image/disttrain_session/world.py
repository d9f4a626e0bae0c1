"""The ranks of a session as a world of the trainer's, made of the script's process group or of one opened here.

Unlike the trainer's own ranks, these meet as torch's `env://` says: under torchrun in the store of its agent.
"""

import json
import os
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from pydantic import ValidationError

from disttrain_api.errors import LayoutError
from disttrain_api.mesh import AXES, Mesh
from disttrain_api.names import Env
from disttrain_api.parallelism import DataParallel, Parallelism
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World, device_mesh_of

_TIMEOUT = timedelta(minutes=10)


def join(environment: Mapping[str, str] = os.environ) -> World:
    """Return the world of this process; alone, where the environment names no peers.

    Raises InvalidConfiguration for a layout that a session cannot have, or for a process group without the CPU.
    """
    parallelism = parallelism_of(environment)
    local = int(environment.get(Env.LOCAL_WORLD_SIZE) or 1)
    device = find_device(int(environment.get(Env.LOCAL_RANK) or 0), local, "OMP_NUM_THREADS" in environment)
    if not dist.is_initialized():
        if environment.get(Env.RANK) and environment.get(Env.MASTER_ADDR):
            dist.init_process_group(device.backend, timeout=_TIMEOUT)
        else:
            _require_no_peers(environment)
            dist.init_process_group(device.backend, store=dist.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT)
    if "cpu" not in dist.get_backend_config():
        raise InvalidConfiguration(
            f"the process group has the backend {dist.get_backend()!r}, which does not reach the CPU: leave "
            "init_process_group to the session, or call it with 'cpu:gloo,cuda:nccl'"
        )
    mesh = mesh_of(parallelism, dist.get_world_size())
    store = dist.distributed_c10d._get_default_store()
    return World(dist.get_rank(), mesh.world_size, device, mesh, device_mesh_of(mesh, device), store)


def parallelism_of(environment: Mapping[str, str]) -> Parallelism:
    """Return `spec.parallelism` of the job; the default outside a job. Raises InvalidConfiguration."""
    text = environment.get(Env.PARALLELISM)
    if not text:
        return Parallelism()
    try:
        return Parallelism.model_validate_json(text)
    except ValidationError as error:
        raise InvalidConfiguration(f"{Env.PARALLELISM} is no `parallelism`: {error.errors()[0]['msg']}") from error


def mesh_of(parallelism: Parallelism, world_size: int) -> Mesh:
    """Return the mesh of a session: replicas and shards alone. Raises InvalidConfiguration for anything else."""
    try:
        mesh = Mesh.of(parallelism, world_size)
    except LayoutError as error:
        raise InvalidConfiguration(f"`parallelism`: {error}") from error
    cut = [axis for axis in (*AXES, "expert") if axis not in ("replicate", "shard") and getattr(mesh, axis) > 1]
    if cut or (parallelism.devices_per_process or 1) > 1:
        raise InvalidConfiguration(
            f"`parallelism` has {cut[0] if cut else 'device'} parallelism: a session wraps a model by data parallelism "
            "(dataParallelReplicateDegree, dataParallelShardDegree); the script itself may do the rest"
        )
    if (settings := parallelism.data_parallel) != DataParallel():
        changed = json.loads(settings.model_dump_json(by_alias=True, exclude_defaults=True))
        raise InvalidConfiguration(
            f"`parallelism.dataParallel.{next(iter(changed))}` is of the trainer's own loop: a session sums gradients "
            "as DDP and FSDP2 do"
        )
    return mesh


def _require_no_peers(environment: Mapping[str, str]) -> None:
    if int(environment.get(Env.WORLD_SIZE) or 1) > 1:
        raise InvalidConfiguration(
            f"WORLD_SIZE is {environment[Env.WORLD_SIZE]} and there is no RANK: start the ranks of a pod with torchrun"
        )
