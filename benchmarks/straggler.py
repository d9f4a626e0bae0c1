"""What a slow worker costs the others with parameters on a server: tasks per second of four workers, which only wait.

One worker three times slower: the others' speed beside that of a worker alone. Goal: Async at least 0.9; Sync, and
BoundedStaleness once its staleness is used up, run at the straggler's third. Random delays of equal mean: all tasks of
BoundedStaleness beside those of Sync. Goal: at least 1.3. Computing is sleeping here: no core is short.
"""

# ruff: noqa: E402 - a script's own folder is on its path, the repository is not

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "api"), str(REPOSITORY / "trainer_image")]

import torch
from torch import nn

from benchmarks import harness
from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_api.training import Data, DataName, Model, ModelName, Training
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.codec import PlainCodec
from disttrain_trainer.parameter_server.protocol.tasks import Result
from disttrain_trainer.parameter_server.protocol.wire import key_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from tools.cluster.ports import free_port

KEY = key_of("benchmark", "uid", 1)
TASK_SECONDS = 0.1
STEPS = 1_000_000
STALENESS = 8

Delay = Callable[[], float]


def run(synchronization: Synchronization, delays: Sequence[Delay], seconds: float) -> list[float]:
    """Tasks per second of each worker, whose tasks take what its delay says, in the second half of the time."""
    address, workers = f"127.0.0.1:{free_port()}", len(delays)
    staleness = STALENESS if synchronization is Synchronization.BOUNDED_STALENESS else None
    settings = ParameterServer(synchronization=synchronization, staleness=staleness)
    model, data = Model(name=ModelName.MLP), Data(name=DataName.DIGITS)
    training = Training(model=model, data=data, steps=STEPS, micro_batch_size=1)
    server = Server(ServerConfig(0, workers, training, Batch(1, 1, workers), settings))
    ended = threading.Event()
    serving = threading.Thread(target=Loop(server, KEY, address).run, args=(ended.is_set,), daemon=True)
    serving.start()
    begin = time.monotonic()
    counts = [0] * workers

    def work(worker: int) -> None:
        parameters = {"only": nn.Parameter(torch.ones(4))}
        parameters["only"].grad = torch.ones(4)
        servers = Servers([address], KEY, worker, parameters, lambda: False, 60.0)
        payload = GradientPayload(servers.placement, parameters, PlainCodec())
        servers.hello(workers * STEPS)
        if worker == 0:
            servers.load({})
            servers.start(0, Cursor(), STEPS)
        done = None
        while time.monotonic() < begin + seconds:
            answer = servers.next(done)
            assert answer.task is not None
            pulled = servers.pull(answer.complete)
            time.sleep(delays[worker]())
            payload.begin(answer.task, 1.0)
            servers.push(answer.task, 1.0, pulled, answer.floor, payload)
            done = (answer.task, Result(0.0, 1.0, 1.0))
            counts[worker] += time.monotonic() > begin + seconds / 2
        servers.close()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.finished = True
    ended.set()
    serving.join()
    return [count / (seconds / 2) for count in counts]


def measure(quick: bool) -> Iterator[harness.Row]:
    seconds = 8.0 if quick else 30.0
    chance = random.Random(1)
    [alone] = run(Synchronization.ASYNC, [lambda: TASK_SECONDS], seconds)
    for synchronization in Synchronization:
        slow = [lambda: TASK_SECONDS, lambda: TASK_SECONDS, lambda: TASK_SECONDS, lambda: 3 * TASK_SECONDS]
        *others, _ = run(synchronization, slow, seconds)
        yield harness.row(f"{synchronization}: beside one 3 x slower", "tasks/s", others, [alone])
    varied = [lambda: chance.expovariate(1 / TASK_SECONDS)] * 4
    sync = sum(run(Synchronization.SYNC, varied, seconds))
    for synchronization in (Synchronization.BOUNDED_STALENESS, Synchronization.ASYNC):
        total = sum(run(synchronization, varied, seconds))
        yield harness.row(f"{synchronization}: random delays, beside Sync", "tasks/s", [total], [sync])


if __name__ == "__main__":
    harness.main(__doc__, measure, ("torch", "pyzmq"))
