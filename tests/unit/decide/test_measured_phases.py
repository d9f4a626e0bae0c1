"""Evaluations, saves and restores count for as long as the ranks have measured them, however seldom somebody asks."""

from dataclasses import replace
from typing import Any

import pytest

from disttrain_api.goodput import by_state
from disttrain_api.report import PhaseSeconds, RankReport
from disttrain_api.status import GoodputState
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.reading import observe
from disttrain_operator.metrics import Metrics
from tests.builders import a_report
from tests.unit.decide.world import World, a_running_world

FIRST, SECOND = "2026-01-01T12:00:05Z", "2026-01-01T12:05:00Z"


def asked(world: World, seconds: float, phase: str, step: int, began: str = FIRST, **measured: float) -> World:
    """Time passes, the agent of the first worker answers, and the operator writes what it has learned."""
    world.pass_time(seconds)
    spent = PhaseSeconds(began=began, **measured)
    report = RankReport(rank=0, step=step, total_steps=100, phase=phase, phase_seconds=spent)
    observed = replace(observe(world.pods.values(), world.gone), live=Live(world.pod()["metadata"]["uid"], 1, report))
    status = decide(world.job, observed, world.now).status
    world.raw_job["status"] = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return world


def spent(world: World) -> dict[str, int]:
    found = world.job.status.goodput
    assert found is not None
    return {state: seconds for state, seconds in by_state(found).items() if seconds}


def a_training_world() -> World:
    return asked(a_running_world(), 20, "Training", 1)


def test_phases_that_nobody_has_seen_are_counted() -> None:
    world = asked(a_training_world(), 100, "Training", 60, evaluating=7.9, saving=2.2)
    assert spent(world) == {"Starting": 20, "Training": 91, "Evaluating": 7, "Saving": 2}
    # Parts of seconds are not lost.
    asked(world, 10, "Training", 65, evaluating=8.3, saving=2.9)
    assert spent(world) == {"Starting": 20, "Training": 100, "Evaluating": 8, "Saving": 2}


def test_the_fleets_count_is_that_of_its_jobs() -> None:
    """Through the decisions themselves: what they move from state to state, the metric moves."""
    world, now = a_training_world(), [0.0]
    metrics, before = Metrics(lambda: now[0]), spent(world)
    metrics.leads(True)
    metrics.saw_job("a", "Running", "Training", gone=False)
    for seconds, step, measured in ((100, 60, (7.9, 2.2)), (10, 65, (8.3, 2.9)), (30, 70, (8.3, 9.1))):
        old = world.job.status
        asked(world, seconds, "Training", step, evaluating=measured[0], saving=measured[1])
        now[0] += seconds
        metrics.wrote_status(old, world.job.status)
    page = metrics.text().decode()
    after = spent(world)
    assert (after["Evaluating"], after["Saving"]) == (8, 9)
    for state in GoodputState:
        counted = after.get(state, 0) - before.get(state, 0)
        assert f'disttrain_job_state_seconds_total{{state="{state}"}} {float(counted)}\n' in page


def test_a_restore_before_the_first_word_was_no_start() -> None:
    world = asked(a_running_world(), 20, "Training", 1, restoring=4.5)
    assert spent(world) == {"Starting": 16, "Restoring": 4}


def test_ranks_that_start_again_in_their_pods_have_restored_meanwhile() -> None:
    world = a_training_world()
    world.raw_job["status"]["goodput"]["state"] = "Restarting"
    asked(world, 9, "Training", 2, SECOND, restoring=3)
    assert spent(world) == {"Starting": 20, "Restarting": 6, "Restoring": 3}


@pytest.mark.parametrize("measured", [15, 23, 40])
def test_a_phase_that_was_seen_is_not_counted_twice(measured: float) -> None:
    world = asked(a_training_world(), 30, "Evaluating", 50)
    asked(world, 10, "Evaluating", 51)
    assert spent(world) == {"Starting": 20, "Training": 30, "Evaluating": 10}
    asked(world, 11, "Training", 52, evaluating=measured)
    assert spent(world) == {"Starting": 20, "Training": 51 - measured, "Evaluating": measured}


def test_of_a_phase_that_ranks_died_in_the_operators_count_stays() -> None:
    world = asked(a_training_world(), 30, "Evaluating", 50, evaluating=2)
    asked(world, 11, "Evaluating", 50, evaluating=2)
    last = RankReport(rank=0, step=50, phase="Evaluating", phase_seconds=PhaseSeconds(began=FIRST, evaluating=2))
    world.pass_time(4).end(0, 1, report=a_report(50).model_copy(update={"progress": last})).end(1, 1).settle()
    assert spent(world)["Evaluating"] >= 11


def test_each_life_of_the_ranks_is_counted_and_the_word_of_a_former_one_is_not() -> None:
    world = asked(a_training_world(), 100, "Training", 60, evaluating=7)
    asked(world, 50, "Training", 70, SECOND, evaluating=5)
    assert spent(world) == {"Starting": 20, "Training": 138, "Evaluating": 12}
    asked(world, 10, "Training", 71, FIRST, evaluating=30)
    asked(world, 10, "Training", 80, SECOND, evaluating=6)
    assert spent(world) == {"Starting": 20, "Training": 157, "Evaluating": 13}


def test_the_last_word_of_another_rank_is_no_life_of_its_own() -> None:
    """Its pod may end before that of rank 0, whose agent is not heard at that moment."""
    world = asked(a_training_world(), 100, "Training", 60, evaluating=30)
    later = PhaseSeconds(began=SECOND, evaluating=30)
    last = RankReport(rank=1, step=60, total_steps=100, phase="Training", phase_seconds=later, done=True)
    world.pass_time(10).end(1, 0, report=a_report(60).model_copy(update={"progress": last})).settle()
    assert spent(world)["Evaluating"] == 30


def test_what_an_older_operator_has_counted_is_not_counted_again() -> None:
    world = asked(asked(a_training_world(), 30, "Evaluating", 50), 10, "Training", 51, evaluating=10)
    del world.raw_job["status"]["goodput"]["life"]
    asked(world, 10, "Training", 60, evaluating=10)
    assert spent(world) == {"Starting": 20, "Training": 40, "Evaluating": 10}
    asked(world, 10, "Training", 70, evaluating=14)
    assert spent(world) == {"Starting": 20, "Training": 46, "Evaluating": 14}


@pytest.mark.parametrize(
    "life",
    [
        {"began": "soon", "restoring": 0, "evaluating": 0, "saving": 0},
        {"began": FIRST, "restoring": 2**62, "evaluating": -(2**62), "saving": 0},
        {"began": FIRST, "restoring": -5, "evaluating": 2**62, "saving": 2**62},
    ],
    ids=lambda life: f"{life['began']}, {life['evaluating']}",
)
@pytest.mark.parametrize("measured", [0, 5, 2.0**52])
def test_whatever_stands_there_seconds_are_moved_and_none_is_made(life: dict[str, Any], measured: float) -> None:
    world = asked(a_training_world(), 30, "Evaluating", 50)
    world.raw_job["status"]["goodput"]["life"] = life
    asked(world, 10, "Training", 51, restoring=measured, evaluating=measured, saving=measured)
    assert sum(spent(world).values()) == 60
    assert min(spent(world).values()) > 0
