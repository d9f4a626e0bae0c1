"""A pod that has a node and does not start: what its Events say of it stands in the status, and outlives the pod."""

from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.bounds import MAX_MESSAGE_BYTES
from disttrain_operator.decide.observed import PodEvent
from disttrain_operator.decide.pod_events import what_holds_up
from tests.builders import NOW, an_init_status, initializing, with_state
from tests.unit.decide.world import World, a_running_world, a_world

DEADLINE = {"runPolicy": {"startingDeadlineSeconds": 1800}}
POD = "digits-3f9a1-worker-0-a1"
NO_MAP = 'MountVolume.SetUp failed for volume "scripts" : configmap "nobody-made-it" not found'
TIMED_OUT = "Unable to attach or mount volumes: unmounted volumes=[scripts], unattached volumes=[]: timed out"
TWICE = 'Multi-Attach error for volume "pvc-7" Volume is already used by pod(s) other-0'
SANDBOX = "Failed to create pod sandbox: plugin type=calico failed"


def an_event(reason: str, message: str, second: int, *, warning: bool = True, **more: Any) -> dict[str, Any]:
    """An Event as kubelets write it."""
    time = f"2026-01-01T12:00:{second:02}Z"
    return {
        "type": "Warning" if warning else "Normal",
        "reason": reason,
        "message": message,
        "lastTimestamp": time,
    } | more


def normal(reason: str, second: int, message: str = "") -> dict[str, Any]:
    return an_event(reason, message, second, warning=False)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        ([normal("Scheduled", 1)], None),
        ([normal("Scheduled", 1), an_event("FailedMount", NO_MAP, 2)], ("FailedMount", NO_MAP)),
        ([an_event("FailedMount", NO_MAP, 9), an_event("FailedMount", "older", 2)], ("FailedMount", NO_MAP)),
        # What repeats another's failure says less than that one.
        ([an_event("FailedMount", NO_MAP, 2), an_event("FailedMount", TIMED_OUT, 9)], ("FailedMount", NO_MAP)),
        (
            [an_event("FailedAttachVolume", TWICE, 2), an_event("FailedMount", TIMED_OUT, 9)],
            ("FailedAttachVolume", TWICE),
        ),
        ([an_event("FailedMount", TIMED_OUT, 9)], ("FailedMount", TIMED_OUT)),
        # What a later step shows to be over is over.
        ([an_event("FailedScheduling", "no room", 1), normal("Scheduled", 2)], None),
        (
            [an_event("FailedMount", NO_MAP, 1), normal("Pulling", 2, 'Pulling image "a"')],
            ("Pulling", 'Pulling image "a"'),
        ),
        ([an_event("FailedMount", NO_MAP, 1), normal("Pulling", 2), normal("Pulled", 3)], None),
        ([normal("Pulling", 2), an_event("FailedCreatePodSandBox", SANDBOX, 3)], ("FailedCreatePodSandBox", SANDBOX)),
        # Events of the newer API have other times, and repeated ones a series.
        (
            [
                an_event("FailedMount", NO_MAP, 0, lastTimestamp=None, eventTime="2026-01-01T12:00:05.123456Z"),
                normal("Scheduled", 3),
            ],
            ("FailedMount", NO_MAP),
        ),
        (
            [
                an_event(
                    "FailedMount",
                    NO_MAP,
                    0,
                    lastTimestamp=None,
                    eventTime="2026-01-01T12:00:01Z",
                    series={"lastObservedTime": "2026-01-01T12:00:08Z"},
                ),
                normal("Scheduled", 3),
            ],
            ("FailedMount", NO_MAP),
        ),
        # Whatever somebody else has written.
        ([{}], None),
        ([an_event("", NO_MAP, 1), an_event("FailedMount", NO_MAP, 0, lastTimestamp="soon", series=7)], None),
        ([an_event("FailedMount", "", 1) | {"message": 7, "reason": ["x"]}], None),
    ],
)
def test_what_holds_a_pod_up_is_its_newest_failure_that_no_later_step_has_overcome(events, expected):
    for order in (events, events[::-1]):
        found = what_holds_up("a-uid", order)
        assert (found and (found.reason, found.message)) == expected
        assert found is None or found.pod_uid == "a-uid"


def test_a_text_of_any_length_is_cut() -> None:
    """Red where the message is passed on as it stands."""
    found = what_holds_up("a-uid", [an_event("F" * 9999, "m" * 99_999, 1)])
    assert (len(found.reason.encode()), len(found.message.encode())) == (128, 1024)


def held_up(reason: str, message: str, **spec: Any) -> World:
    """A gang whose pods have a node and wait for their containers; the Events of the first say why."""
    world = a_world(**spec).settle()
    for pod in list(world.pods.values()):
        world.put(with_state(pod, "Pending", {"waiting": {"reason": "ContainerCreating"}}))
    world.settle()
    world.pod_event = PodEvent(world.pod(0)["metadata"]["uid"], reason, message)
    return world.settle()


@pytest.mark.parametrize(
    ("reason", "message", "advice"),
    [
        ("FailedMount", NO_MAP, "; check that all that the volumes of the template name exists in this namespace"),
        (
            "FailedAttachVolume",
            TWICE,
            (
                "; pods on several nodes need a claim with access mode ReadWriteMany; the volume of a deleted pod is"
                " released within minutes"
            ),
        ),
        ("FailedAttachVolume", "rpc error", "; `kubectl describe pvc` and `kubectl get pv` say more"),
        (
            "FailedCreatePodSandBox",
            SANDBOX,
            (
                "; it is the node's network or container runtime: tell the cluster's administrator, or keep the job off"
                " that node"
            ),
        ),
        ("SomethingNew", "of a later Kubernetes", ""),
    ],
)
def test_the_condition_says_what_the_events_say_and_what_to_do(reason: str, message: str, advice: str) -> None:
    world = held_up(reason, message)
    sentence = f"pod {POD} on node node1: {message}{advice}"
    assert world.condition("Running") == ("False", reason, sentence)
    assert world.job.status.phase == "Pending"
    assert [(event.reason, event.message, event.warning) for event in world.events][-1] == (reason, sentence, True)


def test_the_end_after_the_start_deadline_has_the_reason_and_points_to_no_pod_that_is_gone() -> None:
    world = held_up("FailedMount", NO_MAP, **DEADLINE)
    world.pass_time(3600).settle()
    world.confirm_deletions()
    world.pod_event = None
    status, reason, message = world.settle().condition("Failed")
    assert (status, reason) == ("True", "FailedMount")
    assert f"within startingDeadlineSeconds (1800): pod {POD} on node node1: {NO_MAP}; check" in message
    assert world.pods == {}


def test_a_pod_that_says_itself_why_it_waits_is_believed_before_events() -> None:
    world = held_up("FailedMount", NO_MAP)
    world.put(with_state(world.pod(1), "Pending", {"waiting": {"reason": "InvalidImageName", "message": "no image"}}))
    assert world.settle().condition("Running")[1] == "InvalidImageName"


def test_what_was_read_of_a_pod_whose_init_container_runs_by_now_is_over() -> None:
    """The reader forgets it at its next round, and wakes nobody for that."""
    world = held_up("FailedMount", NO_MAP)
    fetches = an_init_status("fetch", {"running": {"startedAt": "2026-01-01T12:00:00Z"}})
    world.put(initializing(world.pod(0), fetches))
    assert world.settle().condition("Running")[1] == "PodInitializing"


def test_the_events_of_a_pod_that_runs_by_now_count_no_more() -> None:
    world = held_up("FailedMount", NO_MAP)
    world.run_all()
    assert world.condition("Running") == ("True", "AllPodsRunning", "all 2 pods run")
    other = a_running_world()
    other.pod_event = PodEvent("of another attempt", "FailedMount", NO_MAP)
    assert not other.decide().actions
    assert other.settle().condition("Running")[1] == "AllPodsRunning"


def test_an_image_that_is_being_pulled_is_reported_and_no_trouble() -> None:
    world = held_up("Pulling", 'Pulling image "registry/large:1"', **DEADLINE)
    pulls = f'pod {POD} on node node1: Pulling image "registry/large:1"'
    assert world.condition("Running") == ("False", "Pulling", pulls)
    assert world.job.status.phase == "Starting"
    assert "Pulling" not in {event.reason for event in world.events}
    world.pass_time(3600).settle()
    assert world.condition("Failed") == (
        "True",
        "StartingDeadlineExceeded",
        f"not all pods ran within startingDeadlineSeconds (1800): {pulls}",
    )


UNTAKEN = f"no scheduler has bound pod {POD} or reported why not; does the one that its template names run?"


def test_without_any_event_the_message_after_five_minutes_is_where_to_look() -> None:
    world = a_world().settle()
    at = NOW + timedelta(seconds=300)
    assert world.decide().requeue_at == at
    for seconds, more in ((299, ""), (1, f": {UNTAKEN}"), (10**6, f": {UNTAKEN}")):
        condition = world.pass_time(seconds).settle().condition("Running")
        assert condition == ("False", "WaitingForPods", f"waiting for 2 pods to run{more}")
    assert world.decide().requeue_at is None
    assert world.status_writes == 2


def test_where_nobody_says_anything_the_end_names_what_outlives_the_pod() -> None:
    world = held_up("x", "y", **DEADLINE)
    world.pod_event = None
    world.settle()
    assert world.condition("Running") == ("False", "WaitingForPods", "waiting for 2 pods to run")
    world.pass_time(3600).settle()
    assert world.condition("Failed") == (
        "True",
        "StartingDeadlineExceeded",
        (
            f"not all pods ran within startingDeadlineSeconds (1800): pod {POD} on node node1 gives no reason; for an"
            f" hour or so `kubectl get events --field-selector involvedObject.name={POD}` may"
        ),
    )
    untouched = a_world(**DEADLINE).settle().pass_time(3600).settle()
    assert untouched.condition("Failed")[2] == f"not all pods ran within startingDeadlineSeconds (1800): {UNTAKEN}"


def test_a_pod_that_is_made_again_alone_and_does_not_start_has_its_reason_too() -> None:
    rule = {"action": "RestartPod", "roles": ["worker"]}
    world = a_running_world(
        training=None,
        workers={"replicas": 2, "template": {"spec": {"containers": [{"name": "trainer", "command": ["x"]}]}}},
        runPolicy={"failurePolicy": {"rules": [rule]}, "startingDeadlineSeconds": 600},
    )
    world.end(0, 1).settle()
    world.confirm_deletions().settle()
    world.pass_time(60).settle()
    world.put(with_state(world.pod(0), "Pending", {"waiting": {"reason": "ContainerCreating"}}))
    world.pod_event = PodEvent(world.pod(0)["metadata"]["uid"], "FailedMount", NO_MAP)
    world.settle()
    assert world.condition("Running")[:2] == ("True", "FailedMount")
    world.pass_time(3600).settle()
    status, reason, message = world.condition("Failed")
    assert (status, reason) == ("True", "FailedMount")
    assert NO_MAP in message


def test_the_sentence_can_be_written_whatever_it_says() -> None:
    world = held_up("F" * 128, "\u20ac" * 300)
    assert len(world.condition("Running")[2].encode()) <= MAX_MESSAGE_BYTES
