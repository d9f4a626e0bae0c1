"""PipeDream and PipeDream-2BW compute what a single process computes that applies gradients of older weights."""

from functools import cache, partial

import pytest
import torch

from tests.unit.trainer.comparisons import require_same, series
from tests.unit.trainer.delayed import (
    DEPTH,
    GRANITE,
    LAYERS,
    pipedream,
    simulate,
    stages_of_parameters,
    synced,
    two_buffers,
)
from tests.unit.trainer.user_code import double_mlp
from tests.unit.trainer.worlds import run_cases, small, user

TOLERANCE = 1e-10
STEPS = 14
SGD = {"name": "SGD", "learningRate": 0.1}
MOMENTUM = {"name": "SGD", "learningRate": 0.05, "momentum": 0.9, "nesterov": True, "weightDecay": 0.01}
ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
COSINE = {"name": "Cosine", "warmupSteps": 4}
WEIGHTS = {
    "PipeDream": (pipedream, {"schedule": "PipeDream"}),
    "vertical sync": (synced, {"schedule": "PipeDream", "verticalSync": True}),
    "2BW": (two_buffers, {"schedule": "PipeDream2BW"}),
}
# With 50 samples the last batch of an epoch is short.
MICRO = 4
A_GRANITE = {
    "model": {
        "entrypoint": "tests.unit.trainer.transformers_code:double_transformers",
        "config": {"family": "granite"},
    },
    "data": user("double_tokens"),
}
FULL = {"activationCheckpointing": "Full", "offload": {"activations": True}}


def flow(stages, weights, **changes):
    """A pipeline of this many stages, by how it treats its weights."""
    pipeline = {**WEIGHTS[weights][1], "layersPerStage": LAYERS[stages], **changes}
    return {"pipelineParallelDegree": stages, "pipeline": pipeline}


def training(optimizer, **changes):
    common = {
        "model": user("double_mlp", depth=DEPTH),
        "steps": STEPS,
        "logging": {"interval": 1},
        "microBatchSize": MICRO,
        "globalBatchSize": None,
    }
    return small(optimizer=optimizer, **common | changes)


# Ranks, stages, weights, optimizer; changes of the training; options of the simulation.
HELD = {
    f"{weights}, {stages} stages, {name}": (
        (stages, stages, weights, optimizer),
        changes,
        {**options, "per_update": stages if weights == "2BW" else 1},
    )
    for weights in WEIGHTS
    for stages in (2, 3, 4)
    for name, optimizer, changes, options in (
        ("SGD", SGD, {}, {}),
        ("momentum, rate by the step", MOMENTUM, {"lrSchedule": COSINE}, {"schedule": COSINE}),
        ("AdamW, recomputed", ADAMW, FULL, {}),
    )
} | {
    "PipeDream, two replicas": ((4, 2, "PipeDream", MOMENTUM), {}, {"replicas": 2}),
    "vertical sync, two replicas": ((4, 2, "vertical sync", ADAMW), {}, {"replicas": 2}),
    "2BW, two replicas": ((4, 2, "2BW", SGD), {}, {"replicas": 2, "per_update": 2}),
    "PipeDream, accumulated": ((3, 3, "PipeDream", MOMENTUM), {"gradientAccumulationSteps": 2}, {"per_update": 2}),
    "vertical sync, accumulated": ((4, 4, "vertical sync", SGD), {"gradientAccumulationSteps": 2}, {"per_update": 2}),
    "2BW, accumulated": ((3, 3, "2BW", ADAMW), {"gradientAccumulationSteps": 2}, {"per_update": 6}),
    "PipeDream, drained for checkpoints": (
        (3, 3, "PipeDream", MOMENTUM),
        {"checkpoint": {"interval": 4}},
        {"drained": (4, 8, 12)},
    ),
    "PipeDream, drained for a checkpoint that is asked for": ((3, 3, "PipeDream", MOMENTUM), {}, {"drained": (7,)}),
    "PipeDream, drained for evaluations": (
        (4, 4, "PipeDream", SGD),
        {"evaluation": {"interval": 5}},
        {"drained": (5, 10)},
    ),
    "2BW, drained after every step": (
        (2, 2, "2BW", SGD),
        {"evaluation": {"interval": 1}},
        {"drained": range(STEPS), "per_update": 2},
    ),
    "PipeDream, fewer steps than stages": ((4, 4, "PipeDream", SGD), {"steps": 2}, {}),
    "2BW, one step": ((4, 4, "2BW", SGD), {"steps": 1}, {"per_update": 4}),
    "PipeDream, logged now and then": ((2, 2, "PipeDream", SGD), {"logging": {"interval": 5}}, {}),
    "PipeDream, compiled": ((2, 2, "PipeDream", SGD), {"compile": True}, {}),
    **{
        f"{weights}, granite": (
            (2, 2, weights, SGD),
            A_GRANITE,
            {"task": GRANITE, "per_update": 2 if weights == "2BW" else 1},
        )
        for weights in WEIGHTS
    },
}


def case_of(name):
    (_, stages, weights, optimizer), changes, _ = HELD[name]
    asked = {"ask_after": 3} if "asked for" in name else {}
    return [{"training": training(optimizer, **changes), "parallelism": flow(stages, weights), **asked}]


@pytest.fixture(scope="module")
def world(tmp_path_factory, asked_for):
    """Results of the cases of a number of ranks."""
    names = asked_for("test_pipedream", "name")

    @cache
    def run(ranks):
        cases = {name: case_of(name) for name, ((size, *_), *_) in HELD.items() if size == ranks and name in names}
        return run_cases(tmp_path_factory.mktemp(f"ranks-{ranks}"), ranks, cases)

    return run


def optimizer_of(settings):
    rate, decay = settings["learningRate"], settings.get("weightDecay", 0.0)
    if settings["name"] == "SGD":
        momentum, nesterov = settings.get("momentum", 0.0), settings.get("nesterov", False)
        return partial(torch.optim.SGD, lr=rate, momentum=momentum, nesterov=nesterov, weight_decay=decay)
    return partial(torch.optim.AdamW, lr=rate, weight_decay=decay)


@pytest.mark.parametrize("name", HELD)
def test_a_run_equals_its_simulation_in_one_process(world, name):
    (ranks, *_), *_ = HELD[name]
    require_simulated(world(ranks)[name], name)


def require_simulated(found, name):
    """Fails where the result of a case of HELD is not what its simulation computes."""
    (_, stages, weights, optimizer), changes, options = HELD[name]
    assert found["errors"] == [None]
    steps = changes.get("steps", STEPS)
    expected = simulate(WEIGHTS[weights][0], stages, optimizer_of(optimizer), steps, micro=MICRO, **options)
    require_same(found["parameters"], expected.parameters)
    logged = [step for step in range(steps) if (step + 1) % changes.get("logging", {"interval": 1})["interval"] == 0]
    if steps - 1 not in logged:
        logged.append(steps - 1)
    for key, values in (("loss_metrics/global_avg_loss", expected.losses), ("grad_norm", expected.norms)):
        assert series(found, key) == pytest.approx([values[step] for step in logged], rel=TOLERANCE)
    evaluated = series(found, "validation_metrics/global_avg_loss")
    assert evaluated[-1] == pytest.approx(expected.held_out_loss, rel=TOLERANCE)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_versions_memory_and_staleness_are_those_of_the_papers(world, weights, stages):
    line = [line for line in world(stages)[f"{weights}, {stages} stages, SGD"]["metrics"] if "lr" in line][-1]
    sizes = {"PipeDream": range(stages, 0, -1), "vertical sync": [stages] * stages, "2BW": [2] * stages}
    late = {"PipeDream": range(stages - 1, -1, -1), "vertical sync": [stages - 1] * stages, "2BW": [1] * stages}
    mib = stage_mib(stages)
    for stage in range(stages):
        name = f"pipeline/stage_{stage}"
        assert line[f"{name}/versions_of_theory"] == sizes[weights][stage]
        assert line[f"{name}/versions"] == sizes[weights][stage]
        assert line[f"{name}/staleness"] == late[weights][stage]
        assert line[f"{name}/weights_of_theory(MiB)"] == pytest.approx(sizes[weights][stage] * mib[stage])
        assert line[f"{name}/weights(MiB)"] == line[f"{name}/weights_of_theory(MiB)"]


def stage_mib(stages):
    """Memory of the parameters of each stage."""
    named = dict(double_mlp(depth=DEPTH).named_parameters())
    found = [0.0] * stages
    for name, stage in stages_of_parameters(LAYERS[stages], list(named)).items():
        found[stage] += named[name].nbytes / 2**20
    return found


@pytest.mark.parametrize("weights", WEIGHTS)
def test_older_weights_make_a_difference(weights):
    """So that equality above is not that of updating at once, nor of another rule."""
    found = {
        name: simulate(version, 3, optimizer_of(SGD), STEPS, micro=MICRO, per_update=3).losses
        for name, (version, _) in (WEIGHTS | {"at once": (lambda number, stage, stages, of: number // of, {})}).items()
    }
    for name, losses in found.items():
        assert name == weights or losses[-1] != pytest.approx(found[weights][-1], rel=1e-6)
