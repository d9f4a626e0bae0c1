"""Agents that a signal has stopped, through `disttrain run`: real processes, of which the others wait for one."""

from collections.abc import Set

import psutil
import pytest

from tests.chaos import agent_of

from .conftest import Run, Workplace
from .test_restarts_in_place import (
    INTERVAL,
    checkpoint_in_status,
    ends_as_undisturbed,
    is_held,
    job,
    ranks_of,
)


def held(workplace: Workplace) -> tuple[Run, list[psutil.Process], list[psutil.Process]]:
    """A run of two pods whose ranks wait in a step, its ranks, and their agents."""
    run = workplace.start(job(workplace, workplace.folder / "released", pods=2))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    run.until(lambda: checkpoint_in_status(run) == 2 * INTERVAL, "the status has that checkpoint")
    ranks = ranks_of(run)
    return run, ranks, [agent_of(rank) for rank in ranks]


def stop(run: Run, process: psutil.Process) -> None:
    process.suspend()
    run.until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")


@pytest.mark.parametrize(
    ("pod", "whole", "killed", "survivors"),
    [(0, False, 0, [{1}]), (1, False, 1, [{0}]), (1, True, 0, None)],
    ids=["worker 0's agent", "another agent", "another pod"],
)
def test_a_stopped_pod_that_the_others_wait_for_is_recreated_alone(
    workplace: Workplace, pod: int, whole: bool, killed: int, survivors: list[Set[int]] | None
) -> None:
    """Red where what takes connections lives: the others wait for 4 or 15 minutes."""
    run, ranks, agents = held(workplace)
    for process in [agents[pod], *([ranks[pod]] if whole else [])]:
        stop(run, process)
    ranks[killed].kill()
    _, attempt = ends_as_undisturbed(
        workplace, run, workplace.folder / "released", pods=2, restarts=1, survivors=survivors
    )
    (replaced,) = attempt["replacements"]
    assert (replaced["pod"].rpartition("-worker-")[2], replaced["reason"]) == (f"{pod}-a1", "PodSilent")
    assert "does not answer though its node lives, and the others wait for it" in run.stderr
    assert not run.left()


def test_an_agent_that_goes_on_once_the_others_have_lost_it_keeps_its_pod(workplace: Workplace) -> None:
    run, ranks, agents = held(workplace)
    stop(run, agents[1])
    ranks[1].kill()
    released = workplace.folder / "released"
    released.touch()
    run.until(lambda: "the pod of worker 1 is lost; waiting for another one" in run.log(0, attempt=1), "it is awaited")
    agents[1].resume()
    _, attempt = ends_as_undisturbed(workplace, run, released, pods=2)
    assert attempt.get("replacements", []) == []
    assert not run.left()
