"""A small GPT learns text as the pages say: with Muon more than with AdamW."""

import pytest

from tests.unit.trainer.comparisons import HELD_OUT_LOSS, series
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, of_example, run_cases

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

ADAMW = {"name": "AdamW", "learningRate": 0.005, "weightDecay": 0.1}


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
