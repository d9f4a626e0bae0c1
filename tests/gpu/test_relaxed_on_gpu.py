"""Servers, full pipelines and replicas that meet rarely compute on one GPU what one process computes."""

import pytest

from tests.gpu.worlds import beside_each_other, run_on_gpu, run_servers_on_gpu, worlds_of
from tests.unit.trainer import test_local_sgd as local_sgd
from tests.unit.trainer.comparisons import require_same
from tests.unit.trainer.test_pipedream import HELD, case_of, require_simulated
from tests.unit.trainer.worlds import small

ONE_BY_ONE = {"interval": 1, "tensorBoard": False}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
TRAINING = small(optimizer=SGD, logging=ONE_BY_ONE)
ADAMW = small(optimizer={"name": "AdamW", "learningRate": 0.01}, logging=ONE_BY_ONE)


def require_equal(found, expected):
    assert found["errors"] == [[None]] * len(found["errors"])
    require_same(found["parameters"], expected["parameters"])


def start_of_workers(workers, synchronization):
    run = {"settings": {"synchronization": synchronization}, "servers": 2}
    trainings = {"SGD": TRAINING, "AdamW": ADAMW}

    def start(folder):
        alone = {name: [{"training": training}] for name, training in trainings.items()}
        served = {name: [{"training": training, **run}] for name, training in trainings.items()}
        return beside_each_other(
            lambda: run_on_gpu(folder / "alone", 1, alone),
            lambda: run_servers_on_gpu(folder / "servers", workers, served),
        )

    return start


worlds_of("one worker")(start_of_workers(1, "Async"))
worlds_of("two workers")(start_of_workers(2, "Sync"))


@pytest.mark.gpu_path("parameter servers")
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    "workers", [pytest.param(name, marks=pytest.mark.gpu_world(name)) for name in ("one worker", "two workers")]
)
def test_servers_and_workers_on_a_gpu_are_one_process(world, workers, name):
    alone, found = world
    require_equal(found[name], alone[name])


@worlds_of("worker groups")
def start_group(folder):
    cases = {"SGD": [{"training": TRAINING, "servers": 2}]}
    return beside_each_other(
        lambda: run_on_gpu(folder / "alone", 1, {"SGD": [{"training": TRAINING}]}),
        lambda: run_servers_on_gpu(folder / "servers", 2, cases, ranks_per_pod=2),
    )


@pytest.mark.gpu_path("worker groups")
@pytest.mark.gpu_world("worker groups")
def test_a_pod_of_two_ranks_is_one_worker(world):
    alone, found = world
    require_equal(found["SGD"], alone["SGD"])


REPLICAS = ["local SGD", "DiLoCo"]


@worlds_of("local SGD")
def start_replicas(folder):
    runs = dict(local_sgd.cases(2, ()))
    return run_on_gpu(folder, 2, {name: runs[name] for name in REPLICAS})


@pytest.mark.gpu_path("local SGD")
@pytest.mark.gpu_world("local SGD")
@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_that_meet_rarely_are_simulated_ones(world, name):
    _, optimizer, settings, sync = local_sgd.SIMULATED[name]
    optimizer_of = local_sgd.optimizer_of(optimizer)
    expected = local_sgd.simulate(2, optimizer_of, local_sgd.STEPS, sync(2), **settings)
    local_sgd.assert_as_simulated(world[name], expected)


FULL = [
    "PipeDream, 2 stages, momentum, rate by the step",
    "vertical sync, 2 stages, AdamW, recomputed",
    "2BW, 2 stages, SGD",
    "PipeDream, 3 stages, SGD",
]


def start_of_stages(ranks):
    names = [name for name in FULL if HELD[name][0][0] == ranks]
    return lambda folder: run_on_gpu(folder, ranks, {name: case_of(name) for name in names})


for _ranks in (2, 3):
    worlds_of(f"{_ranks} stages")(start_of_stages(_ranks))


@pytest.mark.gpu_path("PipeDream")
@pytest.mark.parametrize(
    "name", [pytest.param(name, id=name, marks=pytest.mark.gpu_world(f"{HELD[name][0][0]} stages")) for name in FULL]
)
def test_full_pipelines_are_delayed_sgd(world, name):
    require_simulated(world[name], name)
