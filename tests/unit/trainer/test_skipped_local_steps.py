"""`training.skipSteps` where replicas take steps alone: all of them skip a step that one cannot use."""

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_api.training import SkipSteps
from disttrain_trainer.optim.step_guard import StepGuard
from disttrain_trainer.strategies.local_sgd import LocalSgd
from tests.unit.trainer.comparisons import require_same, series
from tests.unit.trainer.loading_code import spoilt_samples
from tests.unit.trainer.local_workers import named, simulate
from tests.unit.trainer.test_local_sgd import SIMULATED, STEPS, optimizer_of, training
from tests.unit.trainer.worlds import run_cases

NAMES = ["local SGD", "post-local SGD", "DiLoCo", "BMUF by its defaults", "BMUF, optimizers reset"]
# One sample of the fifty: of one replica, in one of the three steps of an epoch.
SPOILT = {"entrypoint": "tests.unit.trainer.loading_code:spoilt_samples", "config": {"factor": "nan"}}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cases = {}
    for name in NAMES:
        parallelism, optimizer, settings, _ = SIMULATED[name]
        clipped = {"maxGradientNorm": settings["clip"]} if "clip" in settings else {}
        job = training(optimizer, **clipped, data=SPOILT, skipSteps={})
        cases[name] = [{"training": job, "parallelism": parallelism}]
    return run_cases(tmp_path_factory.mktemp("two"), 2, cases)


@pytest.mark.parametrize("name", NAMES)
def test_all_replicas_skip_a_step_that_one_cannot_use(two: dict[str, dict[str, Any]], name: str) -> None:
    _, optimizer, settings, sync = SIMULATED[name]
    workers = simulate(2, optimizer_of(optimizer), STEPS, sync(2), **settings, samples=spoilt_samples(math.nan))
    unusable = sum(not math.isfinite(loss) for loss in workers.losses)
    assert two[name]["errors"] == [None]
    assert max(series(two[name], "skipped_steps")) == unusable >= STEPS // 3
    last = workers.mean() if workers.evaluated is None else workers.evaluated
    require_same(two[name]["parameters"], dict(named(last)))


def a_replica(guard: StepGuard, done: int, summed_steps: int) -> LocalSgd:
    """The one of a job of one rank, which has done so many steps."""
    replica = object.__new__(LocalSgd)
    replica.world = SimpleNamespace(max_tensor=lambda own: own)
    replica.state = SimpleNamespace(step=done, guard=guard)
    replica._replicas = SimpleNamespace(alone=lambda step: step >= summed_steps)
    return replica


@pytest.mark.parametrize(("norm", "judged"), [(math.nan, math.inf), (math.inf, math.inf), (2.5, 2.5)])
def test_the_largest_of_several_norms_is_infinite_where_one_is_not_finite(norm: float, judged: float) -> None:
    """Red where NaN is lost among numbers, or infinity becomes the largest number of FP32."""
    replica = a_replica(StepGuard(SkipSteps()), 5, 0)
    assert replica.judged_norm(lambda: torch.tensor(norm)) == judged


@pytest.mark.parametrize(("done", "kept"), [(7, 8), (8, 0), (9, 8)])
def test_norms_of_a_gradient_of_all_are_no_measure_for_those_of_one_replica(done: int, kept: int) -> None:
    """Red where a healthy job ends when its replicas begin to train alone: their norms are larger by up to the root of
    how many they are."""
    guard = StepGuard(SkipSteps(above_median=4, window=8))
    for step in range(8):
        guard.reason_to_skip(step, 1.0, 1.0)
    a_replica(guard, done, 8).judged_norm(lambda: torch.tensor(5.0))
    assert len(json.loads(guard.state_dict()["state"])["norms"]) == kept
