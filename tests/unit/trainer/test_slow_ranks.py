"""Real ranks of which one takes its time: it is named by what it does itself, and not by what all wait for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from disttrain_trainer.metrics import own_time, waits
from disttrain_trainer.metrics.results import Passes
from disttrain_trainer.parallel import sharded
from disttrain_trainer.runtime.device import GLOO, Device
from tests.unit.trainer.layouts import CONTEXT, FULL, RING, SHARD, TENSOR
from tests.unit.trainer.worlds import run_cases, small, user

CODE = "tests.unit.trainer.slow_rank_code"
ALIKE, SLOW = {"seconds": 0.01, "of_rank_1": 0.01}, {"seconds": 0.01, "of_rank_1": 0.014}
TIMED = {"steps": 25, "logging": {"interval": 5}, "globalBatchSize": 4}
OWN = {"time_metrics/own_median(s)", "time_metrics/own_max(s)"}


def model(**seconds: float) -> dict[str, Any]:
    return small(model={"entrypoint": f"{CODE}:working_model", "config": seconds}, **TIMED)


def late(**seconds: float) -> dict[str, Any]:
    return small(model={"entrypoint": f"{CODE}:late_model", "config": {**seconds, "late": 0.02}}, **TIMED)


def data(**seconds: float) -> dict[str, Any]:
    return small(data={"entrypoint": f"{CODE}:working_samples", "config": seconds}, **TIMED)


def gpt(**config: Any) -> dict[str, Any]:
    return small(model={"entrypoint": f"{CODE}:working_gpt", "config": config}, data=user("double_tokens"), **TIMED)


EXPERTS = {"expertParallelDegree": 2}
PIPELINE, LOCAL = {"pipelineParallelDegree": 2}, {"dataParallel": {"mode": "LocalSGD"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "slow passes": (model(**SLOW), {}, 1),
    "slow passes of several microbatches": (model(**SLOW) | {"gradientAccumulationSteps": 2}, {}, 1),
    "slow samples": (data(**SLOW), {}, 1),
    "slow samples of shards": (data(**SLOW), {SHARD: 2}, 1),
    "slow passes of shards": (model(**SLOW), {SHARD: 2}, 1),
    "slow passes of shards in several microbatches": (
        model(**SLOW) | {"gradientAccumulationSteps": 2},
        {SHARD: 2},
        1,
    ),
    "slow passes of shards, recomputed": (model(**SLOW) | FULL, {SHARD: 2}, 1),
    "passes of shards alike": (model(**ALIKE), {SHARD: 2}, None),
    "slow samples of replicas that train alone": (data(**SLOW), LOCAL, 1),
    "slow passes of such replicas": (model(**SLOW), LOCAL, 1),
    "slow passes with buffers": (late(**SLOW), {}, 1),
    "passes with buffers of a rank that is late": (late(**ALIKE), {}, None),
    "passes alike": (model(**ALIKE), {}, None),
    "samples alike": (data(**ALIKE), {}, None),
    "less than the factor": (model(seconds=0.01, of_rank_1=0.0125), {}, None),
    "slow passes of a tensor group": (model(**SLOW), {TENSOR: 2}, 1),
    "slow samples of a tensor group": (
        data(**SLOW) | {"model": model(seconds=0.0, of_rank_1=0.0)["model"]},
        {TENSOR: 2},
        1,
    ),
    "passes of a tensor group alike": (model(**ALIKE), {TENSOR: 2}, None),
    "slow passes of a tensor group that cuts sequences": (gpt(**SLOW), {TENSOR: 2, "sequenceParallel": True}, 1),
    "slow passes of a context group": (gpt(**SLOW), {CONTEXT: 2}, 1),
    "slow passes of a ring": (gpt(**SLOW), {CONTEXT: 2, **RING}, 1),
    "passes of a ring alike": (gpt(**ALIKE), {CONTEXT: 2, **RING}, None),
    "slow passes of an expert group": (gpt(**SLOW), {SHARD: 2, **EXPERTS}, 1),
    "slow passes of an expert group, recomputed": (gpt(**SLOW) | FULL, {SHARD: 2, **EXPERTS}, 1),
    "passes of an expert group alike": (gpt(**ALIKE), {SHARD: 2, **EXPERTS}, None),
    "experts with uneven tokens": (gpt(**ALIKE, row=0.001, uneven=True), {SHARD: 2, **EXPERTS}, None),
    "slow passes beside experts with uneven tokens": (
        gpt(**SLOW, row=0.0001, uneven=True) | FULL,
        {SHARD: 2, **EXPERTS},
        1,
    ),
    "stages that differ": (model(**SLOW), PIPELINE, None),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    runs = {name: [{"training": training, "parallelism": cut}] for name, (training, cut, _) in CASES.items()}
    return run_cases(tmp_path_factory.mktemp("world"), 2, runs, module="tests.unit.trainer.slow_rank_cases")


@pytest.mark.parametrize("name", CASES)
def test_the_slow_rank_is_reported(results: dict[str, dict[str, Any]], name: str) -> None:
    assert results[name]["errors"] == [None]
    slow = results[name]["report"].slow_rank
    assert (None if slow is None else slow.rank) == CASES[name][2]
    # What it does takes 1.4 times as long: that is all that counts, and no wait.
    assert slow is None or slow.seconds == pytest.approx(1.4 * slow.others_seconds, rel=0.001)
    assert all(line.keys() >= OWN for line in results[name]["metrics"] if "lr" in line)


def test_waits_are_marked_after_a_line_of_the_log_and_then_once_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = own_time.PassClock(Device(torch.device("cpu"), GLOO), SimpleNamespace(begin=lambda: None, end=list))

    def passes_at(now: float) -> Passes | None:
        monkeypatch.setattr(own_time, "time", SimpleNamespace(monotonic=lambda: now))
        clock.begin()
        loss = torch.ones((), requires_grad=True) * 2
        clock.end_with(loss)
        loss.backward()
        return clock.take()

    assert [passes_at(now) is not None for now in (10.0, 10.5, 10.9, 11.0, 11.1)] == [True, False, False, True, False]
    clock.restart()
    assert passes_at(11.2) is not None


@pytest.mark.parametrize(("calls", "known"), [(waits._WAIT, True), (waits._WAIT[1:], False)])
def test_waits_are_marked_only_where_this_torch_has_the_calls(monkeypatch, calls, known):
    """Red where a torch that has renamed one of them would end the training."""
    group = type("Group", (), dict.fromkeys(calls, print))()

    class Sharded(nn.Linear):
        def _get_fsdp_state(self):
            return SimpleNamespace(_fsdp_param_group=group)

    monkeypatch.setattr(sharded, "FSDPModule", Sharded)
    assert waits.Waits(nn.Sequential(Sharded(1, 1)), None).known is known
