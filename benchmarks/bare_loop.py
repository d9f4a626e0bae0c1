"""The reference of trainer_overhead.py: the same model and the same torch calls in a loop that does nothing else.

Run as one rank: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment; arguments: job.json, warm-up steps,
measured steps. Prints seconds per measured step, one line each, on rank 0.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from disttrain_api.jobconfig import JobConfig
from disttrain_trainer.recipe import build_model, load_data


def wrap(module: nn.Module, job: JobConfig, world: int) -> nn.Module:
    """DDP, FSDP2 or tensor parallelism, as one would write it down."""
    if job.parallelism.data_parallel_shard_degree:
        mesh = init_device_mesh("cpu", (world,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    if job.parallelism.tensor_parallel_degree:
        return parallelize_module(module, init_device_mesh("cpu", (world,)), module.tensor_plan())
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def main() -> None:
    job = JobConfig.model_validate_json(Path(sys.argv[1]).read_bytes())
    warm, measured = int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(job.training.seed)
    replicas = 1 if job.parallelism.tensor_parallel_degree else world
    model = wrap(build_model(job.training), job, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.training.optimizer.learning_rate)
    dataset = load_data(job.training).training
    sampler = DistributedSampler(dataset, replicas, dist.get_rank() % replicas)
    batches = iter(DataLoader(dataset, job.training.micro_batch_size, sampler=sampler))
    for step in range(warm + measured):
        began = time.perf_counter()
        inputs, targets = next(batches)
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= warm and dist.get_rank() == 0:
            print(time.perf_counter() - began, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
