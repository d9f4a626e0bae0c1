"""Push and pull of parameters by one worker and 1 or 2 servers over loopback, in GB/s of both directions together.

Reference: the same frames, encrypted alike, without a server behind them, in turn with it. Goal: at least 0.6 of that.
What encryption costs is a row of its own; the copy in memory is the limit of all. The last rows are a forward pass that
begins while parameters come in, and a backward pass during which gradients leave; their references do one after the
other.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

import torch
import zmq
from torch import nn

from benchmarks import harness
from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_api.training import Data, DataName, Model, ModelName, Training
from disttrain_trainer.parameter_server.protocol.codec import PlainCodec
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.sockets import connect, server_socket
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import FRAME_BYTES, key_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from disttrain_trainer.parameter_server.worker.pulling import arriving
from disttrain_trainer.parameter_server.worker.pushing import watched
from tools.cluster.ports import free_port

KEY = key_of("benchmark", "uid", 1)
PARAMETERS = 16


def serve(index: int, address: str) -> None:
    """One server, until it is killed."""
    torch.set_num_threads(1)
    model, data = Model(name=ModelName.MLP), Data(name=DataName.DIGITS)
    training = Training(model=model, data=data, steps=1, micro_batch_size=1)
    settings = ParameterServer(synchronization=Synchronization.ASYNC)
    Loop(Server(ServerConfig(index, 1, training, Batch(1, 1, 1), settings)), KEY, address).run(lambda: False)


def echo(address: str, key: bytes | None) -> None:
    """The transport alone, encrypted with a key: takes frames, and sends the first ones that it took."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER) if key is None else server_socket(context, key)
    socket.bind(f"tcp://{address}")
    kept = None
    while True:
        sender, *frames = socket.recv_multipart(copy=False)
        kept = kept or [frame.buffer for frame in frames]
        answer = [b"taken"] if frames[0].bytes == b"push" else kept
        socket.send_multipart([sender.bytes, *answer], copy=False)


def with_servers(count: int, numbers: int) -> list[Callable[[], float]]:
    """Functions that push and pull once and return the seconds: through our servers, by encrypted frames, by plain
    ones."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    context = multiprocessing.get_context("spawn")
    for index in range(count):
        context.Process(target=serve, args=(index, addresses[index]), daemon=True).start()
    parameters = {f"p{index:02}": nn.Parameter(torch.ones(numbers // PARAMETERS)) for index in range(PARAMETERS)}
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    servers = Servers(addresses, KEY, 0, parameters, lambda: False, 600.0)
    payload = GradientPayload(servers.placement, parameters, PlainCodec())
    servers.load({})
    state = {"step": 0, "pulled": servers.pull()}

    def through_servers() -> float:
        begin = time.perf_counter()
        # Without weight nothing is updated: this is about moving, not about the optimizer.
        servers.push(Task(state["step"], 0), 0.0, state["pulled"], state["step"], payload)
        state["pulled"], state["step"] = servers.pull(), state["step"] + 1
        return time.perf_counter() - begin

    placed = place({name: parameter.numel() for name, parameter in parameters.items()}, count)
    sizes = [[one.size for one in segments] for segments in placed]
    return [through_servers, by_frames(sizes, KEY), by_frames(sizes, None)]


def by_frames(sizes: Sequence[Sequence[int]], key: bytes | None) -> Callable[[], float]:
    """The same numbers to and from processes that only send them back; in our frames where they are encrypted."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    sockets, pieces = [], []
    for numbers in sizes:
        address = f"127.0.0.1:{free_port()}"
        multiprocessing.get_context("spawn").Process(target=echo, args=(address, key), daemon=True).start()
        if key is None:
            sockets.append(context.socket(zmq.DEALER))
            sockets[-1].connect(f"tcp://{address}")
        else:
            sockets.append(connect(context, address, key))
        whole = [memoryview(torch.ones(size).numpy()).cast("B") for size in numbers]
        step = FRAME_BYTES if key is not None else max(map(len, whole))
        pieces.append([piece[at : at + step] for piece in whole for at in range(0, len(piece), step)])

    def move() -> float:
        begin = time.perf_counter()
        for kind in (b"push", b"pull"):
            for socket, piece in zip(sockets, pieces, strict=True):
                socket.send_multipart([kind, *(piece if kind == b"push" else [])], copy=False)
            for socket in sockets:
                socket.recv_multipart(copy=False)
        return time.perf_counter() - begin

    return move


Times = tuple[Callable[[], float], Callable[[], float]]
"""Functions that do the same and return the seconds: meanwhile, and afterwards."""


def beside_computing(layers: int, width: int, batch: int) -> tuple[Times, Times]:
    """Pull with the forward pass, and push with the backward pass, of a model of these layers."""
    address = f"127.0.0.1:{free_port()}"
    multiprocessing.get_context("spawn").Process(target=serve, args=(0, address), daemon=True).start()
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    parameters = dict(model.named_parameters())
    inputs = torch.randn(batch, width)
    servers = Servers([address], KEY, 0, parameters, lambda: False, 600.0)
    payload = GradientPayload(servers.placement, parameters, PlainCodec())
    servers.load({})
    state = {"step": 0, "pulled": servers.pull()}

    def forward(meanwhile: bool) -> float:
        begin = time.perf_counter()
        pulling = servers.begin_pull()
        if not meanwhile:
            pulling.rest()
        with arriving(model, pulling.waits_for, pulling.need):
            model(inputs)
        return time.perf_counter() - begin

    def backward(meanwhile: bool) -> float:
        model.zero_grad()
        loss = model(inputs).sum()
        begin = time.perf_counter()
        task, state["step"] = Task(state["step"], 0), state["step"] + 1
        payload.begin(task, 0.0)
        pushing = servers.begin_push(task, 0.0, state["pulled"], task.step, payload)
        with watched(parameters if meanwhile else {}, 1, pushing.ready):
            loss.backward()
        servers.end_push(pushing, payload)
        return time.perf_counter() - begin

    return (
        (lambda: forward(True), lambda: forward(False)),
        (lambda: backward(True), lambda: backward(False)),
    )


def measure(quick: bool) -> Iterator[harness.Row]:
    megabytes, repeats = (40, 3) if quick else (400, 7)
    moved = 2 * megabytes / 1000
    torch.set_num_threads(1)
    for count in (1, 2):
        ways = with_servers(count, megabytes * 250_000)
        times = [[way() for way in ways] for _ in range(repeats + 1)][1:]
        ours, encrypted, plain = ([moved / seconds for seconds in column] for column in zip(*times, strict=True))
        yield harness.row(f"push + pull of {megabytes} MB, {count} servers", "GB/s", ours, encrypted)
        yield harness.row(f"the frames alone, encrypted, {count} servers", "GB/s", encrypted, plain)
    source = torch.ones(megabytes * 250_000)
    target = torch.empty_like(source)
    copies = []
    for _ in range(repeats):
        begin = time.perf_counter()
        target.copy_(source)
        copies.append(megabytes / 1000 / (time.perf_counter() - begin))
    yield harness.row(f"copy of {megabytes} MB in memory", "GB/s", copies)
    layers, width, batch = (4, 1024, 256) if quick else (16, 2048, 256)
    size = layers * width * (width + 1) * 4 // 1_000_000
    doing = f"pull of {size} MB and forward pass", f"backward pass and push of {size} MB"
    for name, (meanwhile, afterwards) in zip(doing, beside_computing(layers, width, batch), strict=True):
        pairs = [(1 / meanwhile(), 1 / afterwards()) for _ in range(repeats + 1)][1:]
        yield harness.row(name, "1/s", *zip(*pairs, strict=True))


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch", "pyzmq"))
    for child in multiprocessing.active_children():
        child.kill()
