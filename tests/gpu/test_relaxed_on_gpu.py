"""Servers, full pipelines and replicas that meet rarely compute on one GPU what one process computes."""

import pytest

from tests.gpu.worlds import beside_each_other, run_on_gpu, run_servers_on_gpu
from tests.unit.trainer import test_local_sgd as local_sgd
from tests.unit.trainer.test_pipedream import HELD, case_of, require_simulated
from tests.unit.trainer.worlds import require_same, small

ONE_BY_ONE = {"interval": 1, "tensorBoard": False}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
TRAINING = small(optimizer=SGD, logging=ONE_BY_ONE)
ADAMW = small(optimizer={"name": "AdamW", "learningRate": 0.01}, logging=ONE_BY_ONE)


def require_equal(found, expected):
    assert found["errors"] == [[None]] * len(found["errors"])
    require_same(found["parameters"], expected["parameters"])


WORKERS = [
    pytest.param(1, "Async", id="one worker", marks=pytest.mark.gpu_world("one worker")),
    pytest.param(2, "Sync", id="two workers", marks=pytest.mark.gpu_world("two workers")),
]


@pytest.mark.gpu_path("parameter servers")
@pytest.mark.parametrize(("workers", "synchronization"), WORKERS)
def test_servers_and_workers_on_a_gpu_are_one_process(tmp_path, workers, synchronization):
    run = {"settings": {"synchronization": synchronization}, "servers": 2}
    trainings = {"SGD": TRAINING, "AdamW": ADAMW}
    alone, found = beside_each_other(
        lambda: run_on_gpu(tmp_path / "alone", 1, {name: [{"training": one}] for name, one in trainings.items()}),
        lambda: run_servers_on_gpu(
            tmp_path / "servers", workers, {name: [{"training": one, **run}] for name, one in trainings.items()}
        ),
    )
    for name, expected in alone.items():
        require_equal(found[name], expected)


@pytest.mark.gpu_path("worker groups")
@pytest.mark.gpu_world("worker groups")
def test_a_pod_of_two_ranks_is_one_worker(tmp_path):
    cases = {"SGD": [{"training": TRAINING, "servers": 2}]}
    alone, found = beside_each_other(
        lambda: run_on_gpu(tmp_path / "alone", 1, {"SGD": [{"training": TRAINING}]}),
        lambda: run_servers_on_gpu(tmp_path / "servers", 2, cases, ranks_per_pod=2),
    )
    require_equal(found["SGD"], alone["SGD"])


@pytest.mark.gpu_path("local SGD")
@pytest.mark.gpu_world("local SGD")
def test_replicas_that_meet_rarely_are_simulated_ones(tmp_path):
    runs = dict(local_sgd.cases(2))
    names = ["local SGD", "DiLoCo"]
    found = run_on_gpu(tmp_path, 2, {name: runs[name] for name in names})
    for name in names:
        _, optimizer, settings, sync = local_sgd.SIMULATED[name]
        optimizer_of = local_sgd.optimizer_of(optimizer)
        expected = local_sgd.simulate(2, optimizer_of, local_sgd.STEPS, sync(2), **settings)
        local_sgd.assert_as_simulated(found[name], expected)


FULL = [
    "PipeDream, 2 stages, momentum, rate by the step",
    "vertical sync, 2 stages, AdamW, recomputed",
    "2BW, 2 stages, SGD",
    "PipeDream, 3 stages, SGD",
]


def of_world(name):
    ranks = HELD[name][0][0]
    return pytest.param(ranks, name, id=name, marks=pytest.mark.gpu_world(f"{ranks} stages"))


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """Results of the pipelines of so many ranks; run when first asked for."""
    found = {}

    def run(ranks):
        if ranks not in found:
            cases = {name: case_of(name) for name in FULL if HELD[name][0][0] == ranks}
            found[ranks] = run_on_gpu(tmp_path_factory.mktemp(f"full-{ranks}"), ranks, cases)
        return found[ranks]

    return run


@pytest.mark.gpu_path("PipeDream")
@pytest.mark.parametrize(("ranks", "name"), [of_world(name) for name in FULL])
def test_full_pipelines_are_delayed_sgd(full, ranks, name):
    require_simulated(full(ranks)[name], name)
