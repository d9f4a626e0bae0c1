"""Pods with further containers: the job goes by what its program does, what it holds by the phases of its pods."""

from copy import deepcopy
from typing import Any

import pytest

from disttrain_operator.decide.finish import SETTLING_SECONDS
from tests.builders import ended, running, with_sidecar
from tests.unit.decide.world import World, a_running_world


def end_beside_sidecars(world: World, *codes: int) -> World:
    """The programs end with these codes, worker by worker; their sidecars go on."""
    for index, code in enumerate(codes):
        world.end(index, code)
        world.put(with_sidecar(world.pod(index)))
    return world


def held(world: World) -> set[str]:
    """Pods of which a container may still run."""
    return {name for name, pod in world.pods.items() if pod["status"]["phase"] not in ("Succeeded", "Failed")}


def terminating(world: World) -> set[str]:
    return {name for name, pod in world.pods.items() if "deletionTimestamp" in pod["metadata"]}


ENDS: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "complete": ((0, 0), {}, "Complete"),
    "complete with one of them": ((0,), {"successPolicy": {"operator": "First"}}, "Complete"),
    "failed for good": ((7, 7), {"restartPolicy": "Never"}, "Failed"),
    "without a restart left": ((7, 7), {"maxRestarts": 0}, "Failed"),
}


@pytest.mark.parametrize(("codes", "policy", "end"), ENDS.values(), ids=ENDS.keys())
@pytest.mark.parametrize("clean", ["Running", "All"])
def test_a_finished_job_holds_nothing_whichever_containers_would_go_on(codes, policy, end, clean):
    world = a_running_world(runPolicy={**policy, "cleanPodPolicy": clean})
    end_beside_sidecars(world, *codes).pass_time(5).settle()
    assert world.condition(end)[0] == "True"
    world.pass_time(SETTLING_SECONDS).settle()
    assert terminating(world) == set(world.pods) != set()
    assert not world.confirm_deletions().settle().pods


def fail_beside(world: World, *indices: int, code: int = 3, message: str = "no route to the log store") -> World:
    """The further containers of these pods fail, and the programs go on."""
    for index in indices:
        pod = deepcopy(world.pod(index))
        failed = {"exitCode": code, "reason": "Error", "message": message}
        pod["status"]["containerStatuses"].append({"name": "shipper", "state": {"terminated": failed}})
        world.put(pod)
    return world.settle()


def test_a_further_container_that_fails_is_named_and_fails_nothing() -> None:
    world = fail_beside(a_running_world(), 1)
    sentence = (
        "all 2 pods run; beside the program of pod digits-3f9a1-worker-1-a1 container shipper failed (exit code 3)"
    )
    assert world.condition("Running") == ("True", "ContainerFailed", sentence)
    reported = [event for event in world.events if event.reason == "ContainerFailed"]
    assert [(event.warning, event.message) for event in reported] == [(True, world.condition("Running")[2])]
    assert (world.job.status.attempt, world.job.status.phase, world.job.status.ready) == (1, "Running", "2/2")
    fail_beside(world, 0)
    assert " (and others) container shipper failed" in world.condition("Running")[2]
    world.end(0, 0).end(1, 0).settle()
    assert world.condition("Complete")[0] == "True"


def test_a_further_container_that_ends_well_is_no_news() -> None:
    assert fail_beside(a_running_world(), 0, 1, code=0).condition("Running")[1] == "AllPodsRunning"


def test_a_container_that_was_probably_meant_to_train_is_named_in_an_event_once() -> None:
    template = {"spec": {"containers": [{"name": "pytorch", "image": "mine:1"}]}}
    world = a_running_world(workers={"template": template}, runPolicy={"restartBackoffSeconds": 0})
    (event,) = (event for event in world.events if event.reason == "ContainerMisnamed")
    assert event.warning
    assert "the container `pytorch` runs beside the container `trainer`" in event.message
    world.end(0, 137).settle().confirm_deletions().settle()
    assert world.job.status.attempt == 2
    assert [event.reason for event in world.events].count("ContainerMisnamed") == 1


def test_a_finished_job_keeps_its_pods_where_it_was_asked_to() -> None:
    world = a_running_world(runPolicy={"cleanPodPolicy": "None"})
    end_beside_sidecars(world, 0, 0).settle()
    assert world.condition("Complete")[0] == "True"
    assert (len(world.pods), terminating(world)) == (2, set())


def test_a_pod_that_ended_with_its_sidecar_is_no_pod_that_still_runs() -> None:
    world = a_running_world().end(0, 0).end(1, 0)
    world.put(with_sidecar(world.pod(1)))
    world.settle().pass_time(SETTLING_SECONDS).settle()
    assert terminating(world) == {world.pod(1)["metadata"]["name"]}


def test_a_sidecar_that_does_not_end_after_the_job_is_removed_by_force() -> None:
    world = end_beside_sidecars(a_running_world(), 0, 0).settle().pass_time(SETTLING_SECONDS).settle()
    seconds = world.pods[next(iter(world.pods))]["metadata"]["deletionGracePeriodSeconds"]
    assert world.pass_time(seconds).settle().pods
    assert not world.pass_time(60).settle().pods


def test_no_attempt_begins_beside_the_sidecars_of_an_older_one() -> None:
    world = end_beside_sidecars(a_running_world(), 7, 7).pass_time(5).settle()
    assert world.job.status.attempt == 2
    assert held(world) == terminating(world) == {world.pod(0)["metadata"]["name"], world.pod(1)["metadata"]["name"]}
    assert world.condition("Running")[1:] == ("WaitingForOldPods", "waiting for pods older than attempt 2 to end")
    world.confirm_deletions().settle().run_all()
    assert {pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in world.pods.values()} == {"2"}
    assert world.condition("Running")[0] == "True"


def test_in_the_pause_before_an_attempt_no_sidecar_holds_anything() -> None:
    world = a_running_world(runPolicy={"restartBackoffSeconds": 600})
    for _ in range(2):
        end_beside_sidecars(world, 7, 7).pass_time(5).settle()
        last = terminating(world)
        world.confirm_deletions().settle().run_all()
    assert world.condition("Running")[1] == "BackingOff"
    assert len(last) == 2
    assert not world.pods


def test_a_job_is_suspended_when_its_pods_hold_nothing_any_more() -> None:
    world = a_running_world().edit(suspend=True).settle()
    end_beside_sidecars(world, 143, 143).settle()
    assert world.condition("Suspended")[:2] == ("False", "Suspending")
    assert world.confirm_deletions().settle().condition("Suspended")[:2] == ("True", "Suspended")


def test_a_program_that_fails_beside_its_sidecar_is_judged_at_once() -> None:
    world = end_beside_sidecars(a_running_world(), 137)
    world.settle()
    verdict = world.job.status.attempts[0].verdict
    assert (verdict.class_, verdict.exit_code, verdict.pod) == ("Killed", 137, "digits-3f9a1-worker-0-a1")


def sidecar_failed(pod: dict[str, Any], phase: str) -> dict[str, Any]:
    """The pod in this phase, of which a further container has failed."""
    pod = deepcopy(pod)
    failed = {"exitCode": 3, "reason": "Error", "finishedAt": "2026-01-01T11:59:00Z"}
    pod["status"]["containerStatuses"].append({"name": "proxy", "state": {"terminated": failed}})
    pod["status"]["phase"] = phase
    return pod


def test_a_sidecar_that_fails_ends_no_program() -> None:
    world = a_running_world()
    world.put(sidecar_failed(running(world.pod(0)), "Running"))
    assert world.settle().condition("Running")[:2] == ("True", "ContainerFailed")
    world.put(sidecar_failed(ended(world.pod(0), 0), "Failed"))
    world.end(1, 0).settle()
    assert world.condition("Complete")[0] == "True"
