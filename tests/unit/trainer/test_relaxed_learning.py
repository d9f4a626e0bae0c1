"""Replicas that meet less often, gradients of older weights and parameters on servers teach as much, from as many
samples: the digits, and Python byte by byte.

The text is one of the long variants; so are the digits in modes that an example of ours, or pods, learn them in, too.
"""

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
# Of DDP's held-out loss, above which it may lie; knowing nothing costs twice as much.
WITHIN = 0.03
WITHIN_OF_PIPELINES = {"PipeDream": 0.05, "PipeDream, vertical sync": 0.1, "PipeDream-2BW": 0.1}

long = pytest.mark.skipif(not SOAK, reason="one of the long variants")


def tried(modes, *always):
    """All of them in the long run."""
    return list(modes) if SOAK else list(always)


def learned(folder, training, parallelism, ranks=2, ranks_per_pod=1):
    """The figures of the last evaluation."""
    run = {"training": training, "parallelism": parallelism, "ranks_per_pod": ranks_per_pod}
    result = run_cases(folder, ranks, {"case": [run]})["case"]
    assert result["errors"] == [None]
    return result["report"].metrics


def in_pipeline(pipeline, **settings):
    return {"pipelineParallelDegree": 2, "pipeline": {**pipeline, **settings}}


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
    layout = in_pipeline(PIPELINES[name], split="Parameters")
    assert learned(tmp_path, of_example("pipedream"), layout)["accuracy"] >= 0.97


@pytest.mark.parametrize("name", tried(SERVERS, "Async"))
def test_workers_recognise_held_out_digits(tmp_path, name):
    training = of_example("ddp", model={"name": "mlp"}, steps=400)
    assert learned_on_servers(tmp_path, training, SERVERS[name])["accuracy"] >= 0.97


def text(rate=1.0):
    """A small GPT on the sources of the standard library, for fewer steps than the example."""
    model = {"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 32}}
    data = {"name": "text", "config": {"sequenceLength": 32, "heldOutFraction": 0.005}}
    training = of_example("gpt-text", model=model, data=data)
    training["optimizer"]["learningRate"] *= rate
    return training


def late_text(**changes):
    """400 steps of 32 sequences. Gradients come late, so momentum is halved, and the rate rises slowly.

    Nobody clips: PipeDream cannot.
    """
    training = text() | {"steps": 400, "globalBatchSize": 32} | changes
    training["model"]["config"]["tieWeights"] = False
    training["optimizer"] |= {"learningRate": 0.0025, "beta1": 0.5}
    training["lrSchedule"]["warmupSteps"] = 60
    del training["maxGradientNorm"]
    return training


@pytest.fixture(scope="module")
def loss_of_ddp(tmp_path_factory):
    return learned(tmp_path_factory.mktemp("ddp"), text(), {})["loss"]


@pytest.fixture(scope="module")
def late_loss_of_ddp(tmp_path_factory):
    return learned(tmp_path_factory.mktemp("ddp"), late_text(), {})["loss"]


@long
@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_learn_text_nearly_as_well_as_by_ddp(tmp_path, loss_of_ddp, name):
    found = learned(tmp_path, text(), {"dataParallel": REPLICAS[name]})
    assert found["loss"] <= (1 + WITHIN) * loss_of_ddp


@long
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_learn_text_nearly_as_well_as_by_ddp(tmp_path, late_loss_of_ddp, name):
    both = name == "PipeDream-2BW"
    layout = in_pipeline(PIPELINES[name], **({"microbatches": 2} if both else {}))
    found = learned(tmp_path, late_text(microBatchSize=16 if both else 32), layout)
    assert found["loss"] <= (1 + WITHIN_OF_PIPELINES[name]) * late_loss_of_ddp


@long
@pytest.mark.parametrize("name", ["Async", "BoundedStaleness"])  # Sync is AllReduce to rounding, and clips nothing.
def test_workers_learn_text_nearly_as_well_as_by_ddp(tmp_path, loss_of_ddp, name):
    """At half the rate: servers make two updates of a global batch."""
    found = learned_on_servers(tmp_path, text(rate=0.5), SERVERS[name])
    assert found["loss"] <= (1 + WITHIN) * loss_of_ddp
