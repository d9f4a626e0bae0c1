"""What a decision sees of a job follows its versions, and holds what is the job's alone."""

from typing import Any

import pytest

from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.snapshot import LEFT_OUT, Key, Listener, World, children_of
from tests.builders import NOW, UID, a_job, a_raw_job, a_raw_pod, ended, merge, running, waiting


def seen(world: World, raw: dict[str, Any], version: str) -> Job:
    raw["metadata"]["resourceVersion"] = version
    world.jobs.observe(raw)
    job = world.job(UID)
    assert job is not None
    return job


def test_a_new_status_is_seen_and_the_spec_is_not_read_again() -> None:
    world = World()
    first = seen(world, a_raw_job(), "1")
    second = seen(world, a_raw_job(status={"attempt": 3}), "2")
    assert (second.status.attempt, second.resource_version) == (3, "2")
    assert second.spec is first.spec


def test_a_new_spec_is_read() -> None:
    world = World()
    first = seen(world, a_raw_job(workers={"replicas": 2}), "1")
    second = seen(world, a_raw_job(workers={"replicas": 3}), "2")
    assert (first.spec.workers.replicas, second.spec.workers.replicas) == (2, 3)


def test_the_problems_of_a_spec_stay_known_and_go_with_it() -> None:
    world = World()
    wrong = {"workers": {"replicas": "two"}}
    assert seen(world, a_raw_job(**wrong), "1").problems
    assert seen(world, a_raw_job(status={"attempt": 0}, **wrong), "2").problems
    assert not seen(world, a_raw_job(), "3").problems


OWNER = a_raw_pod(a_job())["metadata"]["ownerReferences"][0]
FOREIGN = {
    "of another namespace": {"namespace": "evil"},
    "without an owner": {"ownerReferences": None},
    "whose owner is no controller": {"ownerReferences": [OWNER | {"controller": False}]},
    "whose owner does not say that it is a controller": {"ownerReferences": [{"uid": UID}]},
    "of another kind of owner": {"ownerReferences": [OWNER | {"kind": "ConfigMap"}]},
    "of another group's owner": {"ownerReferences": [OWNER | {"apiVersion": "disttrain.example/v1alpha1"}]},
    "of another job": {"ownerReferences": [OWNER | {"uid": "another"}]},
    "of another job that is controlled by somebody and owned by this job": {
        "ownerReferences": [OWNER | {"controller": None}, OWNER | {"uid": "another"}]
    },
}


class Listens(Listener):
    """Records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def job_changed(self, key: Key, raw: dict[str, Any], *, gone: bool, quietly: bool = False) -> None:
        self.calls.append(f"{key} {'is gone' if gone else 'changed'}{' quietly' if quietly else ''}")

    def enqueue(self, key: Key, *, urgent: bool = False) -> None:
        self.calls.append(f"look at {key}{' at once' if urgent else ''}")

    def pod_gone(self, namespace: str) -> None:
        self.calls.append(f"pod gone of {namespace}")


def a_world(listener: Listener | None = None) -> World:
    world = World(listener or Listener())
    for cache in (world.jobs, world.pods, world.services):
        cache.replace([], 1)
    world.jobs.observe(a_raw_job() | {"metadata": a_raw_job()["metadata"] | {"resourceVersion": "2"}})
    return world


def observed(world: World) -> Observed:
    found = world.snapshot(UID)
    return found[1]


@pytest.mark.parametrize("metadata", FOREIGN.values(), ids=FOREIGN)
def test_a_pod_with_the_jobs_labels_is_not_the_jobs(metadata: dict[str, Any]) -> None:
    listens = Listens()
    world = a_world(listens)
    listens.calls.clear()
    pod = merge(ended(a_raw_pod(a_job()), 0), {"metadata": metadata | {"resourceVersion": "3"}})
    world.pods.apply("ADDED", pod)
    assert observed(world).pods == ()
    world.pods.apply("DELETED", merge(pod, {"metadata": {"resourceVersion": "4"}}))
    assert observed(world).pods == (), "not even among those that are gone"
    assert not any("look at" in call for call in listens.calls), "and wakes nobody"


def test_a_pod_that_the_job_controls_is_the_jobs_whatever_version_of_the_api_says_so() -> None:
    world = a_world()
    owners = [OWNER | {"uid": "another", "controller": None}, OWNER | {"apiVersion": "disttrain.io/v9"}]
    pod = merge(a_raw_pod(a_job()), {"metadata": {"ownerReferences": owners, "resourceVersion": "3"}})
    world.pods.apply("ADDED", pod)
    assert [found.name for found in observed(world).pods] == [pod["metadata"]["name"]]
    assert world.owner(children_of("default", UID)) == Key("default", "digits", UID)


def test_a_listener_is_called_for_a_job_and_for_what_it_controls() -> None:
    listens = Listens()
    world = a_world(listens)
    pod = merge(a_raw_pod(a_job()), {"metadata": {"resourceVersion": "3"}})
    world.pods.apply("ADDED", pod)
    world.pods.apply("DELETED", merge(pod, {"metadata": {"resourceVersion": "4"}}))
    world.wake(UID)
    world.wake("unknown")
    world.jobs.apply("DELETED", merge(a_raw_job(), {"metadata": {"resourceVersion": "5"}}))
    look, job = "look at default/digits", "default/digits"
    assert listens.calls == [f"{job} changed", look, f"{look} at once", "pod gone of default", look, f"{job} is gone"]


A_POD = a_raw_pod(a_job())
DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]}
READY = {"type": "Ready", "status": "True"}
OWN = running(A_POD)["status"]["containerStatuses"]
BESIDE = {"name": "beside", "state": {"terminated": {"exitCode": 1}}}
URGENT = {
    "a new pod": (A_POD, False),
    "it has a node": (merge(A_POD, {"spec": {"nodeName": "a"}}), False),
    "it waits": (waiting(A_POD, "ImagePullBackOff"), False),
    "it runs": (merge(running(A_POD), {"status": {"conditions": [READY]}}), False),
    "it is not ready": (merge(running(A_POD), {"status": {"conditions": [READY | {"status": "False"}]}}), False),
    "it has succeeded": (ended(A_POD, 0), True),
    "it has failed": (ended(A_POD, 1), True),
    "its trainer has ended, and it has not": (merge(ended(A_POD, 1), {"status": {"phase": "Running"}}), True),
    "a further container has failed": (
        merge(A_POD, {"status": {"phase": "Running", "containerStatuses": [*OWN, BESIDE]}}),
        True,
    ),
    "it was rejected": (merge(A_POD, {"status": {"phase": "Failed", "reason": "OutOfcpu"}}), True),
    "it is to make room": (merge(running(A_POD), {"status": DISRUPTED}), True),
    "it is being deleted": (merge(running(A_POD), {"metadata": {"deletionTimestamp": "2026-01-01T12:00:00Z"}}), True),
}


@pytest.mark.parametrize(("pod", "urgent"), URGENT.values(), ids=URGENT)
def test_the_end_of_a_pod_is_urgent(pod: dict[str, Any], urgent: bool) -> None:
    """What else changes of thousands of pods may wait until the job has rested."""
    listens = Listens()
    world = a_world(listens)
    listens.calls.clear()
    world.pods.apply("ADDED", merge(pod, {"metadata": {"resourceVersion": "3"}}))
    assert listens.calls == ["look at default/digits at once" if urgent else "look at default/digits"]


@pytest.mark.parametrize("metadata", FOREIGN.values(), ids=FOREIGN)
def test_a_service_with_the_jobs_labels_is_not_the_jobs(metadata: dict[str, Any]) -> None:
    world = a_world()
    about = merge(a_raw_pod(a_job())["metadata"] | {"name": "digits-3f9a1"}, metadata | {"resourceVersion": "3"})
    world.services.apply("ADDED", {"metadata": about})
    assert not world.has_service(a_job(), "digits-3f9a1")
    own = a_raw_pod(a_job())["metadata"] | {"name": "digits-3f9a1", "uid": "own", "resourceVersion": "4"}
    world.services.apply("ADDED", {"metadata": own})
    assert world.has_service(a_job(), "digits-3f9a1")


def test_a_job_of_which_a_pod_was_left_out_is_left_alone_until_it_is_taken_in() -> None:
    """It would take a pod that it does not see for one that is lost."""
    world = a_world()
    for number in range(100):
        world.pods.observe(
            merge(a_raw_pod(a_job(), uid=f"u{number}"), {"metadata": {"resourceVersion": f"{number + 3}"}})
        )
    world.budget.most_of_one = world.budget.of("default")
    world.pods.observe(merge(a_raw_pod(a_job(), uid="more"), {"metadata": {"resourceVersion": "200"}}))
    found = world.snapshot(UID)
    assert found is not None
    assert found[0].unread == LEFT_OUT
    assert decide(*found, NOW).actions == ()
    world.budget.most_of_one *= 2
    world.pods.observe(merge(a_raw_pod(a_job(), uid="more"), {"metadata": {"resourceVersion": "200"}}))
    found = world.snapshot(UID)
    assert found[0].unread is None
    assert len(found[1].pods) == 101
