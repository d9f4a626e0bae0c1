"""Whatever a pod, its kubelet or its owner has written: its end counts, and the status can be written."""

import json
from copy import deepcopy
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.bounds import MAX_MESSAGE_BYTES, MAX_REASON_LENGTH
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.kept_pod import keep_pod, read_pod
from tests.builders import a_job, a_raw_pod, ended
from tests.unit.decide.world import World, a_running_world

Raw = dict[str, Any]

REPORTS = {
    "not-a-number": '{"progress": {"rank": 0, "step": 5, "totalSteps": 9, "loss": NaN, "samplesPerSecond": Infinity}}',
    "beyond-64-bits": '{"progress": {"rank": 0, "step": 1180591620717411303424, "totalSteps": 9}}',
    "a-rank-beyond-64-bits": '{"failure": {"rank": 1180591620717411303424, "exitCode": 1180591620717411303424}}',
    "no-time": '{"progress": {"rank": 0, "checkpoint": {"step": 5, "path": "x", "time": "soon"}}}',
    "a-time-before-all-times": '{"progress": {"rank": 0, "checkpoint": {"step": 5, "path": "x",'
    ' "time": "0000-01-01T00:00:00Z"}}}',
    "deep": '{"failure":' * 300 + "1" + "}" * 300,
    "figures-without-names": '{"progress": {"rank": 0, "step": 5, "totalSteps": 9, "metrics": {"": 1e999, "x": 1}}}',
    "long": json.dumps({"failure": {"rank": 0, "message": "x" * 4000, "reason": "y" * 4000}}),
    "longer-than-the-kubelet-lets-it-be": "x" * 100_000,
}


@pytest.mark.parametrize("message", REPORTS.values(), ids=REPORTS.keys())
def test_odd_last_words_do_not_hold_the_job(message: str) -> None:
    world = a_running_world()
    world.put(ended(world.pod(0), 1, message=message))
    world.put(ended(world.pod(1), 1, message=message))
    world.settle()
    status = world.raw_job["status"]
    assert status["attempt"] == 2
    assert status["attempts"][0]["verdict"]["exitCode"] == 1
    assert_can_be_written(status)


@pytest.mark.parametrize("time", ["soon", "", "0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "x" * 10_000])
def test_a_time_that_is_none_is_left_out(time: str) -> None:
    world = a_running_world()
    odd = ended(world.pod(0), 1)
    odd["metadata"]["annotations"] = {"disttrain.io/released-at": time}
    odd["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"] = time
    odd["status"]["conditions"] = [
        {"type": "DisruptionTarget", "status": "True", "reason": "X", "lastTransitionTime": time}
    ]
    facts = pod_facts(odd)
    assert (facts.released_at, facts.exit.finished_at, facts.disrupted_at) == (None, None, None)
    world.put(odd)
    world.put(ended(world.pod(1), 1))
    assert world.settle().raw_job["status"]["attempt"] == 2


@pytest.mark.parametrize("grace", [10**11, 2**62])
def test_a_grace_of_thousands_of_years_is_one(grace: int) -> None:
    pod = a_raw_pod(a_job())
    pod["metadata"] |= {"deletionTimestamp": "9994-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace}
    facts = pod_facts(pod)
    assert not facts.deletion.forced


def test_a_container_that_runs_and_has_ended_is_kept_as_it_is_read() -> None:
    pod = ended(a_raw_pod(a_job()), 3)
    state = pod["status"]["containerStatuses"][0]["state"]
    state["running"] = {"startedAt": "2026-01-01T00:00:00Z"}
    facts = pod_facts(pod)
    assert facts.exit is not None
    assert facts == pod_facts(read_pod(keep_pod(pod)))


def test_a_deletion_that_cannot_be_read_is_one_without_grace() -> None:
    pod = a_raw_pod(a_job())
    pod["metadata"] |= {"deletionTimestamp": "2500-01-01T00:00:00Z", "deletionGracePeriodSeconds": 0}
    facts = pod_facts(pod)
    assert facts.deletion.forced
    assert facts.deletion.deadline < datetime(2300, 1, 1, tzinfo=UTC)


def test_words_of_any_length_become_a_status_of_bounded_length() -> None:
    long = "word " * 100_000
    world = a_running_world()
    for index in (0, 1):
        pod = ended(world.pod(index), 1, reason=long, message=long)
        pod["status"] |= {"reason": long, "message": long, "phase": "Failed"}
        pod["spec"]["nodeName"] = "node"
        world.put(pod)
    world.settle()
    assert_can_be_written(world.raw_job["status"])


def test_a_reason_to_wait_of_any_length_becomes_a_condition_of_bounded_length() -> None:
    world = World(a_running_world().raw_job)
    world.raw_job.pop("status")
    world.settle()
    long = "word " * 100_000
    for index in (0, 1):
        pod = deepcopy(world.pod(index))
        waiting = {"waiting": {"reason": long, "message": long}}
        pod["status"]["containerStatuses"] = [{"name": "trainer", "image": long, "state": waiting}]
        world.put(pod)
    world.settle()
    assert_can_be_written(world.raw_job["status"])
    assert world.condition("Running")[0] == "False"


def assert_can_be_written(status: Raw) -> None:
    """As far as bounds go: the API server takes it, and a list of such jobs stays small."""
    json.dumps(status, allow_nan=False)
    assert len(json.dumps(status)) < 40_000
    for entry in status["conditions"]:
        assert len(entry["message"].encode()) <= MAX_MESSAGE_BYTES
        assert len(entry["reason"]) <= MAX_REASON_LENGTH
    for attempt in status.get("attempts", []):
        verdict = attempt.get("verdict") or {"reason": "", "message": ""}
        assert len(verdict["message"].encode()) <= MAX_MESSAGE_BYTES
        assert len(verdict["reason"]) <= MAX_REASON_LENGTH


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Raw]:
    """Objects with any of these fields."""
    return st.fixed_dictionaries({}, optional=fields)


def named(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Raw]]:
    """A few containers with a name, and any of these fields."""
    names = st.fixed_dictionaries({"name": st.sampled_from(["trainer", "other"])}, optional=fields)
    return st.lists(names, max_size=2)


CODES = st.integers(-(2**31), 2**31 - 1)
TEXT = st.text(max_size=20) | st.sampled_from(
    ["0000-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "Ready", "True", "Failed", "OOMKilled"]
)
OPTIONAL = st.none() | TEXT
ENDED = st.fixed_dictionaries(
    {"exitCode": CODES}, optional={"signal": CODES, "reason": TEXT, "message": TEXT, "finishedAt": OPTIONAL}
)
STATE = some(terminated=ENDED, waiting=some(reason=TEXT, message=TEXT), running=some(startedAt=TEXT))
RESOURCES = some(limits=st.dictionaries(st.just("memory"), TEXT))
CONTAINERS = named(restartPolicy=OPTIONAL, resources=RESOURCES)
STATUSES = named(state=STATE, lastState=STATE, image=TEXT, restartCount=CODES, started=st.booleans() | st.none())
CONDITION = st.fixed_dictionaries(
    {"type": st.sampled_from(["Ready", "DisruptionTarget", "PodScheduled", "TerminationTarget"])},
    optional={"status": TEXT, "reason": TEXT, "message": TEXT, "lastTransitionTime": OPTIONAL},
)
POD = st.fixed_dictionaries(
    {
        "metadata": some(
            deletionTimestamp=TEXT,
            deletionGracePeriodSeconds=st.integers(-(2**63), 2**63 - 1),
            annotations=st.dictionaries(st.just("disttrain.io/released-at"), TEXT),
        ),
        "spec": st.fixed_dictionaries({"initContainers": CONTAINERS, "containers": CONTAINERS, "resources": RESOURCES}),
        "status": some(
            phase=TEXT | st.sampled_from(["Pending", "Running"]),
            reason=TEXT,
            message=TEXT,
            conditions=st.lists(CONDITION, max_size=3),
            containerStatuses=STATUSES,
            initContainerStatuses=STATUSES,
        ),
    }
)


@given(POD)
def test_any_pod_of_the_api_servers_schema_is_read(drawn: Raw) -> None:
    """Types are the API server's; everything else is anybody's who may write pods or their statuses."""
    pod = a_raw_pod(a_job())
    pod = {**pod, **drawn, "metadata": pod["metadata"] | drawn["metadata"]}
    facts = pod_facts(pod)
    assert facts is not None
    assert facts == pod_facts(read_pod(keep_pod(pod)))
    world = a_running_world()
    world.put(
        {**pod, "metadata": {**world.pod(0)["metadata"], **pod["metadata"], "uid": world.pod(0)["metadata"]["uid"]}}
    )
    for _ in range(2):
        world.step()
        world.pass_time(200)
    assert_can_be_written(world.raw_job["status"])
