"""A gang that waits for its volume says so, and advises no smaller pods."""

from copy import deepcopy
from typing import Any

import pytest

from tests.builders import a_claim_template
from tests.unit.decide.world import World, a_world

WAIT = (
    "its PersistentVolumeClaim has no volume yet: its storage class creates it; if that takes long, `kubectl describe"
    " pvc` says why"
)


def refused_by_the_scheduler(message: str, **spec: Any) -> World:
    world = a_world(**(spec or {"storage": a_claim_template()})).settle()
    pod = deepcopy(world.pod(0))
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    pod["status"]["conditions"] = [condition]
    world.put(pod)
    return world.settle()


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            (
                "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: 0/3 nodes are"
                " available: 3 Preemption is not helpful for scheduling."
            ),
            WAIT,
        ),
        ("0/1 nodes are available: waiting for first consumer to be created before binding.", WAIT),
        ('running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded', WAIT),
        (
            "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind. preemption: none",
            (
                "its volume is not available on any node: 0/3 nodes are available: 3 node(s) didn't find available"
                " persistent volumes to bind; `kubectl describe pvc` and `kubectl get pv` say more"
            ),
        ),
        ('persistentvolumeclaim "digits-3f9a1-checkpoints" not found', WAIT),
        (
            '0/1 nodes are available: persistentvolumeclaim "mine" not found. preemption: 0/1 nodes are available.',
            'its PersistentVolumeClaim "mine" does not exist; make it, or name another one in the job',
        ),
        (
            '0/1 nodes are available: persistentvolumeclaim "mine" is being deleted.',
            'its PersistentVolumeClaim "mine" is being deleted; wait until it is gone and make it again',
        ),
    ],
)
def test_the_claim_is_named_as_what_is_waited_for(message: str, sentence: str) -> None:
    world = refused_by_the_scheduler(message)
    assert world.condition("Running") == ("False", "VolumeNotBound", f"pod digits-3f9a1-worker-0-a1: {sentence}")
    assert world.job.status.phase == "Pending"


@pytest.mark.parametrize(
    ("storage", "volumes", "claim"),
    [
        ({"claimName": "mine"}, [], 'its PersistentVolumeClaim "mine"'),
        (None, ["corpus"], 'its PersistentVolumeClaim "corpus"'),
        ({"claimName": "mine"}, ["corpus", "mine"], 'one of its PersistentVolumeClaims "mine", "corpus"'),
        (None, [], "its PersistentVolumeClaim"),
    ],
)
@pytest.mark.parametrize("beside", ["", ", 1 Insufficient cpu", ", 2 Too many pods"])
def test_a_claim_of_one_pod_that_another_uses_is_no_want_of_room(storage, volumes, claim, beside):
    mounted = [{"name": f"v{name}", "persistentVolumeClaim": {"claimName": name}} for name in volumes]
    template = {"spec": {"volumes": [*mounted, {"name": "empty", "emptyDir": {}}]}}
    world = refused_by_the_scheduler(
        "0/4 nodes are available: 1 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod"
        f" access mode{beside}. preemption: 0/4 nodes are available: 4 No preemption victims found for incoming pod.",
        storage=storage,
        workers={"replicas": 3, "template": template},
    )
    assert world.condition("Running") == (
        "False",
        "VolumeNotBound",
        (
            f"pod digits-3f9a1-worker-0-a1: {claim} has access mode ReadWriteOncePod and is another pod's, which it"
            " serves alone; use a claim with ReadWriteMany, or wait until that pod has ended where it is not of this"
            " job"
        ),
    )


@pytest.mark.parametrize(
    "message",
    [
        "0/3 nodes are available: 3 Insufficient cpu. preemption: 0/3 nodes are available.",
        "0/3 nodes are available: 1 Insufficient memory, 2 node(s) had volume node affinity conflict.",
    ],
)
def test_where_room_is_missing_the_advice_is_about_room(message: str) -> None:
    world = refused_by_the_scheduler(message)
    assert world.condition("Running")[1] == "Unschedulable"
    assert world.condition("Running")[2].endswith("; wait for room, or ask for fewer or smaller pods")


def test_a_claim_on_its_way_is_one_write_and_no_warning() -> None:
    world = refused_by_the_scheduler('persistentvolumeclaim "digits-3f9a1-checkpoints" not found')
    writes = world.status_writes
    pod = deepcopy(world.pod(0))
    pod["status"]["conditions"][0]["message"] = "pod has unbound immediate PersistentVolumeClaims"
    world.put(pod)
    world.settle()
    assert world.status_writes == writes
    assert [event.warning for event in world.events if event.reason == "VolumeNotBound"] == [False]


def test_a_job_whose_volume_never_comes_fails_with_that_reason_once_it_has_a_deadline() -> None:
    world = refused_by_the_scheduler("0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.")
    assert world.pass_time(10**6).settle().condition("Failed")[0] == "False"
    world.edit(runPolicy={"startingDeadlineSeconds": 60}).settle()
    assert world.condition("Failed")[:2] == ("True", "VolumeNotBound")
