"""Servers, full pipelines and replicas that meet rarely compute on one GPU what one process computes."""

import pytest

from tests.unit.trainer import test_local_sgd as local_sgd
from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.test_pipedream import HELD, case_of, require_simulated
from tests.unit.trainer.worlds import require_same, run_cases, small

TOLERANCE = 1e-10
ONE_BY_ONE = {"interval": 1, "tensorBoard": False}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
TRAINING = small(optimizer=SGD, logging=ONE_BY_ONE)
ADAMW = small(optimizer={"name": "AdamW", "learningRate": 0.01}, logging=ONE_BY_ONE)


def require_equal(found, expected):
    assert found["errors"] == [[None]] * len(found["errors"])
    require_same(found["parameters"], expected["parameters"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    cases = {"SGD": [{"training": TRAINING}], "AdamW": [{"training": ADAMW}]}
    return run_cases(tmp_path_factory.mktemp("alone"), 1, cases, device="cuda")


@pytest.mark.gpu_path("parameter servers")
@pytest.mark.parametrize(("workers", "synchronization"), [(1, "Async"), (2, "Sync")])
def test_servers_and_workers_on_a_gpu_are_one_process(alone, tmp_path, workers, synchronization):
    run = {"settings": {"synchronization": synchronization}, "servers": 2}
    cases = {"SGD": [{"training": TRAINING, **run}], "AdamW": [{"training": ADAMW, **run}]}
    found = run_server_cases(tmp_path, workers, cases, device="cuda")
    for name, expected in alone.items():
        require_equal(found[name], expected)


@pytest.mark.gpu_path("worker groups")
def test_a_pod_of_two_ranks_is_one_worker(alone, tmp_path):
    cases = {"SGD": [{"training": TRAINING, "servers": 2}]}
    found = run_server_cases(tmp_path, 2, cases, ranks_per_pod=2, device="cuda")
    require_equal(found["SGD"], alone["SGD"])


@pytest.mark.gpu_path("local SGD")
def test_replicas_that_meet_rarely_are_simulated_ones(tmp_path):
    runs = dict(local_sgd.cases(2))
    names = ["local SGD", "DiLoCo"]
    found = run_cases(tmp_path, 2, {name: runs[name] for name in names}, device="cuda")
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


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    by_ranks = {HELD[name][0][0]: [other for other in FULL if HELD[other][0][0] == HELD[name][0][0]] for name in FULL}
    found = {}
    for ranks, names in by_ranks.items():
        folder = tmp_path_factory.mktemp(f"full-{ranks}")
        found |= run_cases(folder, ranks, {name: case_of(name) for name in names}, device="cuda")
    return found


@pytest.mark.gpu_path("PipeDream")
@pytest.mark.parametrize("name", FULL)
def test_full_pipelines_are_delayed_sgd(full, name):
    require_simulated(full[name], name)
