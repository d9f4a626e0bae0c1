"""A small GPT learns text as the pages say: with Muon more than with AdamW, in FP8 as much as in BF16."""

import pytest

from tests.unit.trainer.comparisons import HELD_OUT_LOSS, series
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, of_example, run_cases, small

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

ADAMW = {"name": "AdamW", "learningRate": 0.005, "weightDecay": 0.1}
RECIPES = ("Rowwise", "Tensorwise")


def in_bf16(**fields):
    model = {"name": "gpt", "config": {"layers": 2, "heads": 4, "width": 64, "tieWeights": False}}
    data = {"name": "text", "config": {"sequenceLength": 64}}
    optimizer = {"name": "AdamW", "learningRate": 0.003}
    sizes = {"steps": 100, "globalBatchSize": 32, "logging": {"interval": 100}}
    return small(model=model, data=data, optimizer=optimizer, precision="BF16", **sizes, **fields)


def held_out_losses(folder, ranks, trainings, **case):
    """The last one of each training, which must be far below that of a model that knows nothing: 5.5."""
    found = run_cases(folder, ranks, {name: [{"training": given, **case}] for name, given in trainings.items()})
    assert [result["errors"] for result in found.values()] == [[None]] * len(trainings)
    losses = {name: series(result, HELD_OUT_LOSS)[-1] for name, result in found.items()}
    assert all(loss < 3 for loss in losses.values()), losses
    return losses


def test_muon_learns_more_than_adamw_in_its_place(tmp_path):
    """One run of each came to 2.35 and 2.68."""
    trainings = {"Muon": of_example("muon"), "AdamW": of_example("muon", optimizer=ADAMW)}
    losses = held_out_losses(tmp_path, 2, trainings, parallelism={SHARD: 2})
    assert losses["Muon"] < losses["AdamW"] - 0.15, losses


def test_a_model_in_fp8_learns_what_one_in_bf16_does(tmp_path):
    """With four seeds none was more than 2.1 % from BF16; the seeds themselves lie up to 14 % apart."""
    pytest.importorskip("torchao")
    trainings = {"BF16": in_bf16(), **{recipe: in_bf16(float8=recipe) for recipe in RECIPES}}
    losses = held_out_losses(tmp_path, 1, trainings)
    assert len(set(losses.values())) == 3, losses
    for recipe in RECIPES:
        assert losses[recipe] == pytest.approx(losses["BF16"], rel=0.04)
