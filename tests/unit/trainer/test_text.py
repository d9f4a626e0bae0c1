"""A GPT of 4 layers learns the standard library's sources, alike in every layout, also as a mixture of experts."""

import pytest

from tests.soak import SOAK
from tests.unit.trainer.layouts import PIPELINE, SHARD, TENSOR
from tests.unit.trainer.worlds import job, launch

MODEL = {"layers": 4, "heads": 4, "width": 128}
TRAINING = {
    "model": {"name": "gpt", "config": MODEL},
    "data": {"name": "text", "config": {"sequenceLength": 64, "heldOutFraction": 0.02}},
    "optimizer": {"name": "AdamW", "learningRate": 0.003, "weightDecay": 0.1, "beta2": 0.95},
    "lrSchedule": {"name": "Cosine", "warmupSteps": 20, "minimumRatio": 0.1},
    "steps": 800 if SOAK else 60,
    "globalBatchSize": 32,
    "maxGradientNorm": 1.0,
    "evaluation": {"batchSize": 64},
    "logging": {"interval": 100},
}
EXPERTS = TRAINING | {"model": {"name": "gpt", "config": {**MODEL, "experts": 4, "expertsPerToken": 2}}}
LAYOUTS = {
    "dp2": {},
    "fsdp2": {SHARD: 2},
    "tp2": {TENSOR: 2, "sequenceParallel": True},
    "pp2": {PIPELINE: 2, "pipeline": {"schedule": "Interleaved1F1B"}},
}
# One of them in every run, all of them in the long one.
TRIED = list(LAYOUTS) if SOAK else ["pp2"]
LAYOUTS_OF_EXPERTS = {"dp2": {}, "fsdp2, ep2": {SHARD: 2, "expertParallelDegree": 2}}
# Knowing how often each byte occurs costs 3.3.
NATS_PER_BYTE = 1.9 if SOAK else 2.9
# Layouts add the same numbers in another order, and 800 steps make something of the difference.
NOISE = 0.03


def held_out_loss_of(folder, training, parallelism):
    with launch(folder, job(training, parallelism=parallelism), ranks=2) as world:
        ranks = world.ended(within=1800)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    return ranks[0].report.metrics["loss"]


@pytest.fixture(scope="module")
def held_out_loss(tmp_path_factory):
    return {name: held_out_loss_of(tmp_path_factory.mktemp(name), TRAINING, LAYOUTS[name]) for name in TRIED}


@pytest.mark.timeout(4000)
def test_the_text_is_learned(held_out_loss):
    assert max(held_out_loss.values()) <= NATS_PER_BYTE, held_out_loss


@pytest.mark.skipif(not SOAK, reason="one layout has nothing to differ from; the long variant trains all")
@pytest.mark.timeout(4000)
def test_layouts_learn_alike(held_out_loss):
    assert max(held_out_loss.values()) - min(held_out_loss.values()) <= NOISE, held_out_loss


@pytest.mark.skipif(
    not SOAK, reason="minutes; test_moe.py holds each layout to one process, the long variant this, too"
)
@pytest.mark.timeout(4000)
def test_experts_learn_alike_spread_over_ranks_and_on_each(tmp_path):
    losses = {name: held_out_loss_of(tmp_path / name, EXPERTS, layout) for name, layout in LAYOUTS_OF_EXPERTS.items()}
    assert max(losses.values()) <= NATS_PER_BYTE, losses
    assert max(losses.values()) - min(losses.values()) <= NOISE, losses
