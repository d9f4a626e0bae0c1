"""No step waits for a GPU (decision 0042), shown without one: the CPU stands for it."""

import pytest

from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, how_they_ended, job, run_ranks, small

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)
CODE = "tests.unit.trainer.waiting_code:checked_mlp"
LAYOUTS = {"one process": (1, {}), "dp2": (2, {}), "fsdp2": (2, {"dataParallelShardDegree": 2})}


def training(**config):
    return small(
        model={"entrypoint": CODE, "config": config},
        steps=3,
        optimizer={"name": "AdamW", "learningRate": 0.01},
        gradientAccumulationSteps=2,
        maxGradientNorm=0.1,
        logging={"interval": 3},
    )


@pytest.mark.parametrize(("ranks", "parallelism"), LAYOUTS.values(), ids=LAYOUTS)
def test_no_step_looks_at_what_the_device_computes(tmp_path, ranks, parallelism):
    ended = run_ranks(tmp_path, job(training(), parallelism=parallelism), ranks, storage=tmp_path / "storage")
    assert [rank.code for rank in ended] == [0] * ranks, how_they_ended(ended)


def test_a_model_that_does_is_noticed(tmp_path):
    (rank,) = run_ranks(tmp_path, job(training(waits=True)), storage=tmp_path / "storage")
    assert rank.code != 0
    assert "this step would wait for a GPU" in rank.err
