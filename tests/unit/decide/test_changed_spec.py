"""What the API server lets change once a job has run counts from the next pod, or the next failure, on."""

import pytest

from disttrain_api.names import Role
from disttrain_operator.plan.desired import Site, pod, service
from tests.builders import a_report, running
from tests.unit.decide.world import World, a_running_world

SITE = Site(trainer_image="an/image:1", token="a-token")


def suspended(**spec: object) -> World:
    world = a_running_world(**spec).edit(suspend=True).settle()
    world.end(0, 143, report=a_report(40, checkpoint=40)).end(1, 143).confirm_deletions().settle()
    assert world.job.status.phase == "Suspended"
    return world


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_job_that_was_suspended_goes_on_with_the_pods_that_it_asks_for_by_then(replicas: int) -> None:
    template = {"metadata": {"labels": {"team": "b"}}, "spec": {"nodeSelector": {"pool": "b"}}}
    world = suspended().edit(suspend=False, workers={"replicas": replicas, "template": template}).settle().run_all()
    assert (world.job.status.attempt, world.job.status.restarts) == (2, 0)
    assert sorted(world.pods) == [f"digits-3f9a1-worker-{index}-a2" for index in range(replicas)]
    assert world.condition("Running")[0] == "True"
    assert world.job.status.ready == f"{replicas}/{replicas}"
    made = pod(world.job, Role.WORKER, 0, 2, SITE)
    assert made["spec"]["nodeSelector"] == {"pool": "b"}
    assert made["metadata"]["labels"]["team"] == "b"


def test_servers_may_join_a_job_of_programs_of_ones_own_while_it_is_suspended() -> None:
    servers = {"replicas": 2, "image": "an/image:1"}
    own = {"training": None, "workers": {"image": "an/image:1", "command": ["serve"]}}
    world = suspended(**own)
    before = service(world.job, SITE)
    world.edit(suspend=False, parameterServers=servers).settle()
    assert len(world.pods) == 4
    for index in range(2):
        world.put(running(world.pod(index, Role.PS)))
    assert world.run_all().condition("Running")[:2] == ("True", "AllPodsRunning")
    assert service(world.job, SITE) == before, "the Service that was made once selects them"


def failed_once_more(world: World) -> World:
    return world.end(0, 1).pass_time(5).settle().end(1, 1).confirm_deletions().settle().pass_time(60).settle().run_all()


def test_more_restarts_may_be_given_to_a_job_that_has_used_up_its_own() -> None:
    world = failed_once_more(a_running_world(runPolicy={"maxRestarts": 1}))
    assert (world.job.status.attempt, world.job.status.restarts) == (2, 1)
    world = failed_once_more(world.edit(runPolicy={"maxRestarts": 2}))
    assert (world.job.status.attempt, world.job.status.restarts, world.job.status.phase) == (3, 2, "Running")
    world = failed_once_more(world)
    assert world.condition("Failed")[1] == "RestartsExhausted"
