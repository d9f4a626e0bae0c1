"""A run that was stopped and resumed equals, bit for bit, one that never was."""

from functools import cache

import numpy as np
import pytest
import torch

from disttrain_trainer.data.sampler import permute
from tests.unit.trainer.comparisons import require_same_bits, series
from tests.unit.trainer.user_layers import of_layers
from tests.unit.trainer.worlds import run_cases, small, user

LONG = small(
    steps=7,
    model=user("wide_mlp"),
    optimizer={"name": "AdamW", "learningRate": 0.003},
    lrSchedule={"name": "Cosine", "warmupSteps": 2},
    gradientAccumulationSteps=2,
    maxGradientNorm=1.0,
    logging={"interval": 1},
    checkpoint={"interval": 100},
)
EXTRA, LATE = "extra state", "layers that come late"
SGD = {"name": "SGD", "learningRate": 0.05, "momentum": 0.9}
TRAININGS = {
    "AdamW, dropout, several buckets": LONG,
    "SGD": {**LONG, "optimizer": SGD},
    "SGD without momentum": {**LONG, "optimizer": {"name": "SGD", "learningRate": 0.05}},
    # A small one: where a processor has no products in BF16, Muon's take seconds each.
    "Muon": {**LONG, "model": user("double_mlp"), "optimizer": {"name": "Muon", "learningRate": 0.02}},
    "Adafactor": {**LONG, "optimizer": {"name": "Adafactor", "learningRate": 0.05}},
    "BF16": {**LONG, "precision": "BF16"},
    "FP16 with its scaler": {**LONG, "precision": "FP16"},
    "GPT with tied weights": small(
        steps=7,
        model={"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 16, "dropout": 0.1}},
        data={"name": "synthetic", "config": {"kind": "Tokens", "size": 60, "sequenceLength": 8}},
        optimizer={"name": "AdamW", "learningRate": 0.01},
        logging={"interval": 1},
    ),
    "noise of the data": small(
        steps=7, data=of_layers("noisy_samples"), optimizer=SGD, logging={"interval": 1}, checkpoint={"interval": 100}
    ),
    "buffers": small(steps=7, model=user("normed_mlp"), logging={"interval": 1}),
    EXTRA: small(
        steps=7,
        model=of_layers("remembering", forms=["containers", "bytes in a tensor", "number", "tensor"]),
        logging={"interval": 1},
    ),
    LATE: small(steps=7, model=of_layers("late_layers"), logging={"interval": 1}),
}
STATIC = {"dataParallel": {"staticGraph": True}}
CUT = {
    f"{LATE}, shards": {"dataParallelShardDegree": 2},
    "Muon, shards": {"dataParallelShardDegree": 2},
    f"{LATE}, tensor": {"tensorParallelDegree": 2},
    f"{LATE}, pipeline": {"pipelineParallelDegree": 2, "pipeline": {"layersPerStage": [2, 3]}},
    "GPT with tied weights, context": {"contextParallelDegree": 2},
    f"{EXTRA}, shards": {"dataParallelShardDegree": 2},
    f"{EXTRA}, pipeline": {"pipelineParallelDegree": 2, "pipeline": {"layersPerStage": [4, 5]}},
    f"{EXTRA}, static graph": STATIC,
    f"{EXTRA}, devices": {"devicesPerProcess": 2},
}
CUT_IN_FOUR = {
    "GPT with tied weights, context and pipeline": {
        "contextParallelDegree": 2, "pipelineParallelDegree": 2, "pipeline": {"microbatches": 2},
    },
}  # fmt: skip
STATIC_TRAININGS = {
    f"{name}, static graph": TRAININGS[name]
    for name in ("AdamW, dropout, several buckets", "buffers", "noise of the data")
}


GENERATORS = ("Python", "NumPy", "torch")


def ids(value):
    return f"{value} rank{'s' if value > 1 else ''}" if isinstance(value, int) else value


# A static graph is about several replicas, a layout about two ranks.
COMBINATIONS = [
    (ranks, name)
    for ranks in (1, 2, 3)
    for name in (*TRAININGS, *(STATIC_TRAININGS if ranks > 1 else ()), *(CUT if ranks == 2 else ()))
] + [(4, name) for name in CUT_IN_FOUR]


@pytest.fixture(scope="module")
def splits(tmp_path_factory):
    """Where ranks say what they hold out."""
    return tmp_path_factory.mktemp("splits")


@pytest.fixture(scope="module")
def results(splits, tmp_path_factory, asked_for):
    """Results of the cases with a number of ranks."""

    @cache
    def run(ranks):
        return run_cases(tmp_path_factory.mktemp("resume"), ranks, dict(cases(ranks)))

    def cases(ranks):
        yield "stopped at once", [{"training": LONG, "stop_after": 0}, {"training": LONG}]
        yield "never stopped", [{"training": LONG}]
        for name in sorted(asked_for("test_resume", "name", ranks=ranks)):
            cut = (CUT | CUT_IN_FOUR).get(name)
            training = (TRAININGS | STATIC_TRAININGS)[name] if cut is None else TRAININGS[name.split(",")[0]]
            run = {"training": training, "parallelism": STATIC if name in STATIC_TRAININGS else cut or {}}
            yield f"{name}: through", [run]
            yield f"{name}: resumed", [{**run, "stop_after": 4}, {**run, "stop_after": 1}, run]
        for how in asked_for("test_resume", "how") if ranks == 2 else ():
            data = of_layers("drawn_split", folder=str(splits), how=how)
            drawn = {"training": small(steps=3, seed=1, data=data, callbacks=[of_layers("Draws")])}
            other = {"training": {**drawn["training"], "seed": 2, "steps": 4}}
            yield f"split, {how}", [{**drawn, "stop_after": 1}, drawn, other]

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3], ids=ids)
def test_a_run_stopped_before_its_first_step_begins_anew(results, ranks):
    stopped = "Stopped: SIGTERM: stopped before the first step was done; the next start is at step 0"
    found, expected = (results(ranks)[name] for name in ("stopped at once", "never stopped"))
    assert found["errors"] == [stopped, None]
    require_same_bits(found["parameters"], expected["parameters"])


@pytest.mark.parametrize(("ranks", "name"), COMBINATIONS, ids=ids)
def test_a_resumed_run_equals_one_that_never_stopped(results, ranks, name):
    through, resumed = (results(ranks)[f"{name}: {how}"] for how in ("through", "resumed"))
    assert resumed["errors"] == [
        "Stopped: SIGTERM: stopped after step 4, its checkpoint is written",
        "Stopped: SIGTERM: stopped after step 5, its checkpoint is written",
        None,
    ]
    require_same_bits(resumed["parameters"], through["parameters"])
    assert len(series(through)) == 7
    assert series(resumed) == series(through)


@pytest.mark.parametrize("how", GENERATORS)
def test_a_split_that_is_drawn_is_the_seeds(results, splits, how):
    """The same on all ranks and in every attempt."""
    stopped, *rest = results(2)[f"split, {how}"]["errors"]
    assert stopped.startswith("Stopped: ")
    assert rest == [None, None]
    one, other = ((splits / f"{how}-{rank}").read_text().splitlines() for rank in (0, 1))
    assert one == other
    first, again, with_another_seed = one
    assert first == again != with_another_seed


# Ranks, samples per step, steps: an epoch of 50 samples.
PARTS = [(2, 8, 3), (3, 12, 1), (1, 7, 2)]
RATE = 0.5


def test_an_epoch_goes_on_with_other_ranks_and_another_batch(tmp_path):
    """Each sample changes a row of its own, once, by what its share of the batch is: none is repeated, none skipped."""
    training = small(
        steps=sum(steps for _, _, steps in PARTS),
        model=user("table_of_samples", size=50),
        data=user("numbered_samples", size=50),
        optimizer={"name": "SGD", "learningRate": RATE},
        seed=3,
    )
    for ranks, batch, steps in PARTS:
        run = {"training": {**training, "globalBatchSize": batch}}
        last = (ranks, batch, steps) == PARTS[-1]
        result = run_cases(tmp_path, ranks, {"epoch": [run if last else {**run, "stop_after": steps}]})["epoch"]
    sizes = np.repeat([batch for _, batch, _ in PARTS], [batch * steps for _, batch, steps in PARTS])
    expected = torch.empty(50, 5, dtype=torch.float64)
    for sample, batch in zip(permute(np.arange(50), 50, 3, 0), sizes, strict=True):
        # From zeros all classes are as likely.
        expected[sample] = RATE / batch * (torch.eye(5, dtype=torch.float64)[sample % 5] - 0.2)
    assert result["errors"] == [None]
    torch.testing.assert_close(result["parameters"]["weight"], expected, rtol=1e-10, atol=0)
