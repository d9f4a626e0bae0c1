"""Jobs that have done their work end with exit code 0, every time: gloo's threads can abort a process at its end."""

import pytest

from tests.soak import SOAK
from tests.unit.trainer.layouts import GPT, PIPELINE, SHARD, TENSOR
from tests.unit.trainer.worlds import job, launch, small, user

RUNS = 20 if SOAK else 1
MOE = {"model": user("double_moe_gpt"), "data": user("double_tokens")}
KINDS = {
    "replicas": ({}, GPT),
    "shards": ({SHARD: 2}, GPT),
    "tensor": ({TENSOR: 2}, GPT),
    "pipeline": ({PIPELINE: 2}, GPT),
    "zero bubble": ({PIPELINE: 2, "pipeline": {"schedule": "ZBVZeroBubble"}}, GPT),
    "experts": ({SHARD: 2, "expertParallelDegree": 2}, MOE),
    "ring": ({"dataParallel": {"allReduce": "Ring"}}, GPT),
    "compressed": ({"dataParallel": {"compression": {"name": "TopK", "ratio": 0.1}}}, GPT),
}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_every_run_ends_well(tmp_path, kind):
    parallelism, what = KINDS[kind]
    for run in range(RUNS):
        training = small(steps=3, **what, checkpoint={"interval": 1})
        with launch(
            tmp_path / f"{run}", job(training, parallelism=parallelism), 2, storage=tmp_path / f"{run}"
        ) as world:
            ranks = world.ended()
        assert [rank.code for rank in ranks] == [0, 0], f"run {run}: {ranks[0].err}\n{ranks[1].err}"
        assert all(rank.report.done for rank in ranks)
