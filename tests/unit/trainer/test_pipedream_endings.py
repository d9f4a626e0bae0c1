"""How pipelines without flush end and go on: stops, checkpoints, a killed stage, losses not finite, refusals."""

import re
import signal
from functools import partial

import pytest
import torch

from disttrain_api.names import ExitCode
from tests.unit.trainer.comparisons import model_at, require_same, require_same_bits, series
from tests.unit.trainer.delayed import DEPTH, LAYERS, pipedream, simulate, two_buffers
from tests.unit.trainer.worlds import job, launch, run_cases, run_ranks, small, user

TOLERANCE = 1e-10
STAGES, STEPS, MICRO, INTERVAL = 3, 12, 4, 8
RATE, MOMENTUM = 0.05, 0.9
MODEL = user("double_mlp", depth=DEPTH)
OPTIMIZER = {"name": "SGD", "learningRate": RATE, "momentum": MOMENTUM}
PIPEDREAM = {"schedule": "PipeDream", "layersPerStage": LAYERS[STAGES]}
TWO_BUFFERS = {"schedule": "PipeDream2BW", "layersPerStage": LAYERS[STAGES]}
ASKED_AFTER = 3
# Steps after which a wish to stop takes effect.
LAG = {"PipeDream": 3, "2BW": 1}
SETTINGS = {"PipeDream": (pipedream, PIPEDREAM, 1), "2BW": (two_buffers, TWO_BUFFERS, STAGES)}


def piped(pipeline, stages=STAGES):
    return {"pipelineParallelDegree": stages, "pipeline": pipeline}


def training(**changes):
    sizes = {"steps": STEPS, "microBatchSize": MICRO, "globalBatchSize": None}
    intervals = {"logging": {"interval": 1}, "checkpoint": {"interval": INTERVAL}}
    return small(**{"model": MODEL, "optimizer": OPTIMIZER} | sizes | intervals | changes)


DIVERGING = training(optimizer={"name": "SGD", "learningRate": 1e200}, loss={"name": "MeanSquaredError"}, steps=40)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cases = {}
    for name, (_, pipeline, _) in SETTINGS.items():
        run = {"training": training(), "parallelism": piped(pipeline)}
        cases[f"{name}: stopped"] = [{**run, "stop_after": ASKED_AFTER}, run]
        cases[f"{name}: through"] = [run]
        first, then = ({**run, "training": training(steps=steps)} for steps in (INTERVAL, STEPS))
        cases[f"{name}: from a checkpoint"] = [first, then]
        cases[f"{name}: not finite"] = [{"training": DIVERGING, "parallelism": piped(pipeline)}]
    tied = small(model=user("double_gpt"), data=user("double_tokens"), globalBatchSize=None, microBatchSize=4)
    cases["tied"] = [{"training": tied, "parallelism": piped({"schedule": "PipeDream"})}]
    builtin = {"model": {"name": "gpt"}, "data": {"name": "text"}}
    cases["tied, built in"] = [{"training": tied | builtin, "parallelism": piped({"schedule": "PipeDream"})}]
    mlp = {"name": "mlp", "config": {"hiddenSizes": [16] * 3}}
    bf16 = training(precision="BF16", model=mlp, data={"name": "digits"})
    cases["BF16"] = [{"training": bf16, "parallelism": piped({"schedule": "PipeDream"})}]
    gpt = {"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 16, "tieWeights": False}, "metaDevice": True}
    tokens = {"name": "synthetic", "config": {"kind": "Tokens", "size": 60, "sequenceLength": 8}}
    meta = training(model=gpt, data=tokens, steps=1)
    whole = {"training": meta | {"microBatchSize": STAGES * MICRO}, "parallelism": piped({"schedule": "PipeDream"})}
    cases["built without memory: PipeDream"] = [whole]
    cases["built without memory: replicas"] = [{"training": meta}]
    return run_cases(tmp_path_factory.mktemp("endings"), STAGES, cases)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stop_drains_and_the_run_goes_on_from_there(results, name):
    version, _, per_update = SETTINGS[name]
    found = results[f"{name}: stopped"]
    # The fourth step is the first that is asked after so many.
    drained = ASKED_AFTER + 1 + LAG[name]
    assert found["errors"] == [f"Stopped: SIGTERM: stopped after step {drained}, its checkpoint is written", None]
    expected = simulate(
        version, STAGES, partial(torch.optim.SGD, lr=RATE, momentum=MOMENTUM), STEPS, micro=MICRO,
        per_update=per_update, drained={drained, *range(INTERVAL, STEPS, INTERVAL)},
    )  # fmt: skip
    assert series(found) == pytest.approx(expected.losses, rel=TOLERANCE)
    require_same(found["parameters"], expected.parameters)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_that_never_ended(results, name):
    expected, found = (results[f"{name}: {how}"] for how in ("through", "from a checkpoint"))
    assert found["errors"] == [None, None]
    assert series(found) == series(expected)
    require_same_bits(found["parameters"], expected["parameters"])


@pytest.mark.parametrize("name", SETTINGS)
def test_a_loss_that_is_not_finite_ends_all_ranks(results, name):
    """The world goes on to its next case, so all ranks have left this one."""
    (error,) = results[f"{name}: not finite"]["errors"]
    assert error.startswith("NonFiniteLoss: the ")


def test_stages_that_share_a_parameter_are_refused(results):
    reason = "stages of PipeDream and PipeDream2BW update at different times, so they cannot share a parameter"
    (error,) = results["tied"]["errors"]
    assert error.startswith("InvalidConfiguration: `parallelism.pipeline.schedule`: stages 0, 2 share ")
    assert error.endswith(f": {reason}, or use another schedule")
    assert results["tied, built in"]["errors"] == [
        f"InvalidConfiguration: spec.training.model.config.tieWeights: {reason}: set it to false"
    ]


def test_half_precision_keeps_whole_parameters(results):
    assert results["BF16"]["errors"] == [None]
    assert {value.dtype for value in results["BF16"]["parameters"].values()} == {torch.float32}
    found = series(results["BF16"])
    assert min(found[-5:]) < found[0]


def test_a_model_built_without_memory_begins_as_in_every_layout(results):
    expected, found = (series(results[f"built without memory: {how}"]) for how in ("replicas", "PipeDream"))
    assert len(expected) == 1
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_killed_stage_restarts_from_the_checkpoint(tmp_path):
    described = job(training(steps=40, data=user("slow_samples", seconds=0.01)), parallelism=piped(PIPEDREAM))
    storage, undisturbed = tmp_path / "storage", tmp_path / "undisturbed"
    for folder in (storage, undisturbed):
        folder.mkdir()
    with launch(tmp_path / "first", described, STAGES, storage) as world:
        world.wait_until(lambda: (report := world.report(0)) is not None and report.checkpoint is not None)
        # The one in the middle, which loads no samples.
        world.processes[1].send_signal(signal.SIGKILL)
        codes = [rank.code for rank in world.ended()]
    assert codes == [ExitCode.PEER_LOST, -signal.SIGKILL, ExitCode.PEER_LOST]
    ended = run_ranks(tmp_path / "second", described, STAGES, storage, attempt=2)
    assert [rank.code for rank in ended] == [0] * STAGES
    assert "resuming after step" in ended[0].out
    assert [rank.code for rank in run_ranks(tmp_path / "through", described, STAGES, undisturbed)] == [0] * STAGES
    require_same_bits(model_at(storage, 40), model_at(undisturbed, 40))


def test_microbatches_of_two_shapes_are_refused(tmp_path):
    changes = {"model": user("tagging_layers"), "data": user("growing_tokens"), "microBatchSize": 1}
    described = job(training(**changes), parallelism=piped({"schedule": "PipeDream"}, stages=2))
    first, second = run_ranks(tmp_path, described, 2)
    assert first.code == ExitCode.INVALID_CONFIGURATION
    assert re.search(r"a stage gave \[1, [45], 12\] of float32 after \[1, [45], 12\] of float32", first.err)
    assert second.code == ExitCode.PEER_LOST
