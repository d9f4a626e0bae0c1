"""Replicas that meet less often, gradients of older weights and parameters on servers teach as much, from as many
samples; the long variant tries all modes."""

import pytest

from tests.soak import SOAK
from tests.unit.trainer.server_jobs import a_job, ended
from tests.unit.trainer.worlds import of_example, run_cases

SECONDS = 900.0
pytestmark = pytest.mark.timeout(2 * SECONDS)

REPLICAS = {
    "local SGD": {"mode": "LocalSGD", "localSGD": {"period": 8}},
    "post-local SGD": {"mode": "LocalSGD", "localSGD": {"period": 8, "warmupSteps": 50}},
    # 25 outer steps are too few for the momentum that DiLoCo's hundreds have.
    "DiLoCo": {"mode": "LocalSGD", "localSGD": {"period": 8, "outerOptimizer": {"momentum": 0.5}}},
    "BMUF": {"mode": "BMUF", "bmuf": {"period": 8}},
}
IN_PODS = {"mode": "LocalSGD", "localSGD": {"period": 4, "globalPeriod": 16}}
PIPELINES = {
    "PipeDream": {"schedule": "PipeDream"},
    "PipeDream, vertical sync": {"schedule": "PipeDream", "verticalSync": True},
    "PipeDream-2BW": {"schedule": "PipeDream2BW"},
}
SERVERS = {
    "Sync": {"synchronization": "Sync"},
    "Async": {"synchronization": "Async"},
    "BoundedStaleness": {"synchronization": "BoundedStaleness", "staleness": 4},
}


def tried(modes, *always):
    """All of them in the long run."""
    return list(modes) if SOAK else list(always)


def learned(folder, training, parallelism, ranks=2, ranks_per_pod=1):
    """The figures of the last evaluation."""
    run = {"training": training, "parallelism": parallelism, "ranks_per_pod": ranks_per_pod}
    result = run_cases(folder, ranks, {"case": [run]})["case"]
    assert result["errors"] == [None]
    return result["report"].metrics


def learned_on_servers(folder, training, mode):
    """By two workers and two servers."""
    with a_job(folder, training, servers=2, parameterServer=mode) as running:
        ends = [ended(world, rank, SECONDS) for rank, world in enumerate(running.workers)]
        assert [code for code, _ in ends] == [0, 0], ends
        return ends[0][1].metrics


@pytest.mark.parametrize("name", tried(REPLICAS, "DiLoCo"))
def test_replicas_recognise_held_out_digits(tmp_path, name):
    assert learned(tmp_path, of_example("ddp"), {"dataParallel": REPLICAS[name]})["accuracy"] >= 0.97


def test_pods_recognise_held_out_digits(tmp_path):
    found = learned(tmp_path, of_example("ddp"), {"dataParallel": IN_PODS}, ranks=4, ranks_per_pod=2)
    assert found["accuracy"] >= 0.97


@pytest.mark.parametrize("name", tried(PIPELINES, "PipeDream-2BW"))
def test_pipelines_recognise_held_out_digits(tmp_path, name):
    layout = {"pipelineParallelDegree": 2, "pipeline": {**PIPELINES[name], "split": "Parameters"}}
    assert learned(tmp_path, of_example("pipedream"), layout)["accuracy"] >= 0.97


@pytest.mark.parametrize("name", tried(SERVERS, "Async"))
def test_workers_recognise_held_out_digits(tmp_path, name):
    training = of_example("ddp", model={"name": "mlp"}, steps=400)
    assert learned_on_servers(tmp_path, training, SERVERS[name])["accuracy"] >= 0.97
