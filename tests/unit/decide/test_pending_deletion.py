"""A pod of a running gang that is deleted by somebody else ends in peace, and who deleted it counts."""

import pytest

from disttrain_api.names import ExitCode
from disttrain_api.report import RankFailure
from tests.builders import a_claim_template, a_report
from tests.unit.decide.test_failures import restart, verdict
from tests.unit.decide.world import a_running_world


def test_a_drain_waits_for_the_checkpoint_and_does_not_count() -> None:
    world = a_running_world(storage=a_claim_template()).drain(1).settle()
    assert world.condition("Running")[:2] == ("True", "PodLeaving")
    assert "digits-3f9a1-worker-1-a1 is being deleted (Drained)" in world.condition("Running")[2]
    stopped = RankFailure(rank=1, exit_code=143, reason="Stopped", message="stopped after a checkpoint")
    world.end(1, ExitCode.STOPPED, report=a_report(40, checkpoint=40, failure=stopped))
    world.end(0, ExitCode.STOPPED, report=a_report(40, checkpoint=40)).settle()
    found = verdict(world)
    assert (found.class_, found.reason, found.action) == ("Disruption", "Drained", "RestartWithoutCounting")
    assert found.pod == "digits-3f9a1-worker-1-a1"
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 0)


@pytest.mark.parametrize(
    ("reason", "word"),
    [("PreemptionByScheduler", "Preempted"), ("TerminationByKubelet", "Evicted"), ("DeletionByPodGC", "NodeLost")],
)
def test_what_the_cluster_does_is_named_and_not_counted(reason: str, word: str) -> None:
    world = a_running_world(runPolicy={"maxRestarts": 0}).drain(1, reason).end(1, 137).end(0, 1)
    restart(world)
    assert verdict(world).reason == word
    assert world.job.status.attempt == 2
    assert world.condition("Running")[0] == "True"


def test_a_person_who_deletes_a_pod_is_the_cause_and_counts() -> None:
    world = a_running_world().drain(1, None).settle()
    world.end(1, ExitCode.STOPPED, report=a_report(4)).end(0, ExitCode.STOPPED, report=a_report(4)).settle()
    found = verdict(world)
    assert (found.class_, found.reason, found.pod) == ("PodLost", "PodLost", "digits-3f9a1-worker-1-a1")
    assert world.job.status.restarts_since_checkpoint == 1


@pytest.mark.parametrize("reason", ["EvictionByEvictionAPI", None])
def test_the_termination_message_of_a_removed_pod_still_shows_that_it_was_asked_to_end(reason: str | None) -> None:
    """The kubelet removes an ended pod with a grace of 0, which moves its deletion behind its end."""
    world = a_running_world().drain(1, reason)
    stopped = RankFailure(rank=0, exit_code=143, reason="Stopped", message="stopped")
    for index in (0, 1):
        world.end(index, ExitCode.STOPPED, report=a_report(4, failure=stopped))
    last = world.pod(1)
    last["metadata"] |= {"deletionTimestamp": "2026-01-01T12:00:01Z", "deletionGracePeriodSeconds": 0}
    world.remove(last["metadata"]["name"])
    world.pass_time(1).settle()
    assert verdict(world).pod == "digits-3f9a1-worker-1-a1"


def test_a_pod_that_failed_before_it_was_drained_failed_by_itself() -> None:
    world = a_running_world().end(1, 3).pass_time(1)
    pod = world.pod(1)
    pod["metadata"] |= {"deletionTimestamp": "2026-01-01T12:01:01Z", "deletionGracePeriodSeconds": 60}
    pod["status"]["conditions"] = [
        {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "",
            "lastTransitionTime": "2026-01-01T12:00:01Z",
        }
    ]
    world.pass_time(3).settle()
    assert verdict(world).class_ == "Program"
