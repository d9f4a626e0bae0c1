"""The sum over parameter servers for allreduce.py: each rank pushes what it has and pulls what comes of all.

As many servers as ranks, each a process of its own, as pods of their own would be; a step of Sync is one sum.
"""

import multiprocessing
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer
from disttrain_api.training import Data, DataName, Model, ModelName, Optimizer, OptimizerName, Training
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.codec import PlainCodec
from disttrain_trainer.parameter_server.protocol.tasks import Result
from disttrain_trainer.parameter_server.protocol.wire import key_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from disttrain_trainer.runtime.json_collectives import all_gather
from tools.cluster.ports import free_port

KEY = key_of("benchmark", "uid", 1)
BATCH = Batch(1, 1, 1)
PATIENCE_SECONDS = 300.0


def serve(index: int, workers: int, steps: int, address: str) -> None:
    """One server, until it is killed. Its parameter becomes less by the mean of what is pushed."""
    torch.set_num_threads(1)
    model, data = Model(name=ModelName.MLP), Data(name=DataName.DIGITS)
    optimizer = Optimizer(name=OptimizerName.SGD, learning_rate=1.0)
    training = Training(model=model, data=data, optimizer=optimizer, steps=steps, micro_batch_size=1)
    config = ServerConfig(index, workers, training, BATCH, ParameterServer())
    Loop(Server(config), KEY, address).run(lambda: False)


def sums(values: torch.Tensor, repeats: int, group: dist.ProcessGroup) -> Iterator[tuple[float, int]]:
    """Seconds of each repeat, from all ranks' begin to all ranks' end, and bytes over the busiest connection in its
    busier direction: a worker's, or a server's. Raises RuntimeError where the sum is wrong."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    address = f"127.0.0.1:{free_port()}"
    # One step more: who has done the last one is not answered with another.
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(rank, ranks, repeats + 1, address), daemon=True
    )
    process.start()
    addresses = all_gather(address, str, group)
    parameter = nn.Parameter(torch.zeros_like(values))
    servers = Servers(addresses, KEY, rank, {"values": parameter}, lambda: False, PATIENCE_SECONDS)
    payload = GradientPayload(servers.placement, {"values": parameter}, PlainCodec())
    servers.hello(ranks * (repeats + 1))
    if rank == 0:
        servers.load({})
        servers.start(0, Cursor(), repeats + 1)
    dist.barrier(group)
    answer = servers.next()
    pulled = servers.pull(answer.complete)
    share = max(sum(segment.size for segment in segments) for segments in servers.placement)
    for repeat in range(repeats):
        parameter.grad = torch.ones_like(values)
        dist.barrier(group)
        began = time.perf_counter()
        assert answer.task is not None
        sent = servers.push(answer.task, 1.0, pulled, answer.floor, payload)
        answer = servers.next((answer.task, Result(0.0, 1.0, 1.0)))
        pulled = servers.pull(answer.complete)
        dist.barrier(group)
        seconds = time.perf_counter() - began
        if not (parameter == -(repeat + 1)).all():
            raise RuntimeError(f"servers of {ranks} ranks do not give the mean")
        yield seconds, max(sent, ranks * share * values.element_size())
    servers.close()
    # Nobody ends a server that another rank still leaves.
    dist.barrier(group)
    process.kill()
    process.join()
