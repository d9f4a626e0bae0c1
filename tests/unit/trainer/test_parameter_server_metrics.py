"""What is reported of each server and each worker: counted by real servers, turned into figures by the first worker."""

from itertools import count
from types import SimpleNamespace

import pytest
import torch

from disttrain_trainer.parameter_server.protocol.counters import WorkerCounters, counters_of, total_of
from disttrain_trainer.parameter_server.protocol.wire import Message
from disttrain_trainer.parameter_server.worker import metrics
from disttrain_trainer.parameter_server.worker.metrics import CounterMetrics
from tests.unit.trainer.test_parameter_server_state import a_server, loaded

BYTES = 3 * 8
"""Size of the first range of a server, in float64."""


class Scene:
    """Two servers and who asks them; time passes when a test moves it. One of them stands for the manager, too."""

    def __init__(self):
        self.servers = [loaded(a_server()), loaded(a_server())]
        self.now, self.lost, self.pulled_bytes = 0.0, [0, 0], 0
        self.numbers = count()
        self.rates = CounterMetrics(self, lambda: self.now)

    def ask(self, server, worker, kind, tensors=(), **fields):
        message = Message(kind, {"worker": worker, **fields}, tensors)
        [(_, answer)] = self.servers[server].receive((b"w", b"%d" % next(self.numbers)), message, self.now)
        return answer

    def pull(self, server, worker):
        return self.ask(server, worker, "pull", ranges=[0]).fields["taken"]

    def push(self, server, worker, step, taken=0):
        gradient = [torch.ones(3, dtype=torch.float64)]
        part = {"task": [step, worker], "weight": 1.0, "taken": taken, "floor": 0, "ranges": [0]}
        self.ask(server, worker, "push", gradient, **part)

    def figures(self):
        answers = []
        for server in range(len(self.servers)):
            fields = self.ask(server, 0, "figures").fields
            identity = self.servers[server].identity()
            answers.append(SimpleNamespace(fields={"live": 2, "server": identity, **fields}))
        return answers


@pytest.fixture
def scene():
    made = Scene()
    made.now = 1.0
    made.rates.figures()  # what was loaded is behind us
    return made


def test_each_server_and_each_worker_is_reported(scene):
    # Worker 1 pulls once, worker 0 pushes three times, then worker 1 does: three are in between.
    taken = [scene.pull(server, 1) for server in (0, 1)]
    for step in range(3):
        for server in (0, 1):
            scene.push(server, 0, step, taken=step)
    scene.push(0, 1, 0, taken[0])
    scene.now = 3.0
    found = scene.rates.figures()
    per_server = {key.removeprefix("servers/"): value for key, value in found.items() if key.startswith("servers/0/")}
    assert per_server == {
        "0/version": 4.0,
        "0/pushes_per_second": 2.0,
        "0/pulls_per_second": 0.5,
        "0/pushed_bytes": 4 * BYTES,
        "0/pulled_bytes": BYTES,
        "0/staleness_mean": 0.75,
    }
    assert (found["servers/1/version"], found["servers/1/pushes_per_second"]) == (3.0, 1.5)
    assert (found["servers/pushes_per_second"], found["servers/pulls_per_second"]) == (2.0, 0.5), "the busiest one's"
    workers = {key.removeprefix("workers/"): value for key, value in found.items() if key.startswith("workers/")}
    assert workers == {
        "0/pushes_per_second": 1.5,
        "0/pulls_per_second": 0.0,
        "0/pushed_bytes": 6 * BYTES,
        "0/pulled_bytes": 0.0,
        "0/staleness_mean": 0.0,
        "1/pushes_per_second": 0.5,
        "1/pulls_per_second": 0.5,
        "1/pushed_bytes": BYTES,
        "1/pulled_bytes": 2 * BYTES,
        "1/staleness_mean": 3.0,
    }
    assert (found["servers/staleness/0"], found["servers/staleness/3"], found["servers/staleness_max"]) == (3, 1, 3)


def test_figures_are_of_the_time_since_the_last_ones(scene):
    scene.push(0, 0, 0)
    scene.rates.figures()
    scene.now = 2.0
    found = scene.rates.figures()
    assert found["servers/0/pushes_per_second"] == found["servers/0/pushed_bytes"] == 0.0
    assert "servers/0/staleness_mean" not in found, "the mean of no pushes"
    assert "servers/staleness_mean" not in found


def test_a_push_that_comes_twice_counts_once_and_its_bytes_twice(scene):
    scene.push(0, 0, 0)
    scene.push(0, 0, 0)
    scene.now = 2.0
    found = scene.rates.figures()
    assert (found["servers/0/pushes_per_second"], found["servers/0/pushed_bytes"]) == (1.0, 2 * BYTES)
    assert found["servers/late_pushes"] == 1.0


@pytest.mark.parametrize("pushes", [1, 5])
def test_a_server_that_was_made_again_counts_from_nothing(scene, pushes):
    for step in range(3):
        for server in (0, 1):
            scene.push(server, 0, step, taken=step)
    scene.rates.figures()
    scene.servers[0] = loaded(a_server())
    for step in range(pushes):
        scene.push(0, 0, 3 + step, taken=step)
    scene.push(1, 0, 3, taken=3)
    scene.now = 2.0
    found = scene.rates.figures()
    assert found["servers/0/pushes_per_second"] == found["servers/staleness/0"] == pushes
    assert found["servers/1/pushes_per_second"] == 1.0
    # What was loaded into the new life is none of worker 0's pushes, but it has sent it.
    load = 8 * 8
    assert found["workers/0/pushed_bytes"] == (pushes + 1) * BYTES + load


def test_of_too_many_workers_none_is_reported(scene, monkeypatch):
    scene.push(0, 1, 0)
    assert any(key.startswith("workers/") for key in scene.rates.figures())
    monkeypatch.setattr(metrics, "MAX_REPORTED_WORKERS", 1)
    scene.push(0, 1, 1)
    found = scene.rates.figures()
    assert not any(key.startswith("workers/") for key in found)
    assert "servers/0/pushes_per_second" in found


def test_the_sum_of_counters_and_their_way_over_the_wire():
    assert total_of([]) == WorkerCounters()
    assert total_of([WorkerCounters(1, 2, 3, 4, 5), WorkerCounters(10, 20, 30, 40, 50)]) == WorkerCounters(
        11, 22, 33, 44, 55
    )
    assert WorkerCounters() == WorkerCounters(0, 0, 0, 0, 0)
    assert counters_of({"7": [1, 2, 3, 4, 5]}) == {7: WorkerCounters(1, 2, 3, 4, 5)}
