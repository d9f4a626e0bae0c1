"""Learning rates against their closed forms, and against torch's own schedulers."""

import pytest
import torch
from torch.optim import lr_scheduler

from disttrain_api.training import LrSchedule
from disttrain_trainer.optim.schedules import rate_factor
from disttrain_trainer.runtime.errors import InvalidConfiguration

STEPS = 50


def rates(**schedule):
    return [rate_factor(LrSchedule(**schedule), step, STEPS) for step in range(STEPS)]


def torchs(make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_constant():
    assert rates(name="Constant") == [1.0] * STEPS


@pytest.mark.parametrize("minimum", [None, 0.0, 0.1, 1.0])
def test_linear_equals_torchs(minimum):
    expected = torchs(lambda o: lr_scheduler.LinearLR(o, 1.0, minimum or 0.0, STEPS - 1))
    assert rates(name="Linear", minimum_ratio=minimum) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("minimum", [None, 0.0, 0.1, 1.0])
def test_cosine_equals_torchs(minimum):
    expected = torchs(lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS - 1, eta_min=minimum or 0.0))
    assert rates(name="Cosine", minimum_ratio=minimum) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["Constant", "Linear", "Cosine"])
def test_warm_up_rises_to_the_peak_and_the_rest_is_the_named_shape(name):
    found = rates(name=name, warmup_steps=10)
    assert found[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    rest = [rate_factor(LrSchedule(name=name), step, STEPS - 10) for step in range(STEPS - 10)]
    assert found[10:] == pytest.approx(rest)


@pytest.mark.parametrize("name", ["Linear", "Cosine"])
def test_the_last_step_has_the_minimum(name):
    assert rates(name=name, warmup_steps=5, minimum_ratio=0.25)[-1] == pytest.approx(0.25)


@pytest.mark.parametrize("name", ["Constant", "Linear", "Cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (1, 2), (3, 3)])
def test_the_shortest_runs(name, warmup, steps):
    schedule = LrSchedule(name=name, warmup_steps=warmup)
    assert all(0.0 <= rate_factor(schedule, step, steps) <= 1.0 for step in range(steps))


def test_a_shape_of_ones_own():
    code = "tests.unit.trainer.task_code"
    assert rates(entrypoint=f"{code}:halving") == [1.0] * 20 + [0.5] * 20 + [0.25] * 10
    for step in range(6):
        with pytest.raises(InvalidConfiguration, match="expected a number from 0 on"):
            rate_factor(LrSchedule(entrypoint=f"{code}:slow"), step, STEPS)
