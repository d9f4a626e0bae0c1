"""Reading the Events of pods that do not start: of whom, how often, and what an answer that is none costs."""

import itertools
from datetime import timedelta
from typing import Any

import pytest

from disttrain_api.names import Role
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.observed import PodEvent
from disttrain_operator.kube.client import Client
from disttrain_operator.pod_events import MAX_BYTES, MOST, PATIENCE_SECONDS, PAUSE_SECONDS, ROUND_SECONDS, PodEvents
from disttrain_operator.snapshot import Sources, World
from tests.builders import NOW, a_job, a_raw_job, a_raw_pod, running, waiting, with_state
from tests.unit.operator.fake_api import FakeApi, refusal

Raw = dict[str, Any]
CREATING = {"waiting": {"reason": "ContainerCreating"}}


def of_namespace(raw: Raw, namespace: str, number: int) -> Raw:
    return raw | {"metadata": raw["metadata"] | {"namespace": namespace, "uid": f"{namespace}-{number}"}}


class Waits:
    """Jobs whose pods do not start, and a clock."""

    def __init__(self, api: FakeApi, client: Client) -> None:
        self.api, self.world, self.woken, self.now, self.acts = api, World(), list[str](), 1000.0, True
        for cache in (self.world.jobs, self.world.pods, self.world.services):
            cache.replace([], 1)
        self.reader = PodEvents(
            client, self.world, self.woken.append, lambda: self.acts, clock=lambda: self.now, now=lambda: NOW
        )
        self._version = 10

    def job(self, namespace: str = "default", number: int = 0, pods: int = 1, attempt: int = 1) -> str:
        """A job with pods that have a node and nothing else; its uid."""
        raw = of_namespace(a_raw_job(workers={"replicas": 4}), namespace, number)
        self.observe(self.world.jobs, raw)
        uid: str = raw["metadata"]["uid"]
        for index in range(pods):
            self.pod(uid, index, attempt)
        return uid

    def pod(self, uid: str, index: int, attempt: int = 1, change: Any = None, **metadata: Any) -> str:
        """Its pod with this index, which the kubelet has not started yet or which `change` makes of that."""
        raw = a_raw_pod(a_job(workers={"replicas": 4}), Role.WORKER, index, attempt)
        pod_uid = f"{uid}-{index}-{attempt}"
        owner = {**raw["metadata"]["ownerReferences"][0], "uid": uid}
        raw["metadata"] |= {"namespace": uid.rpartition("-")[0], "uid": pod_uid, "ownerReferences": [owner]} | metadata
        self.observe(self.world.pods, change(raw) if change else with_state(raw, "Pending", CREATING))
        self.world.snapshot(uid)
        return pod_uid

    def observe(self, cache: Any, raw: Raw) -> None:
        self._version += 1
        raw["metadata"]["resourceVersion"] = str(self._version)
        cache.observe(raw)

    async def say(self, message: str, namespace: str = "default", name: str = "one") -> None:
        time = "2026-01-01T12:00:00Z"
        fields = {"type": "Warning", "reason": "FailedMount", "message": message, "lastTimestamp": time}
        await self.api.put(f"/api/v1/namespaces/{namespace}/events/{name}", **fields)

    async def after(self, seconds: float) -> list[str]:
        """The namespaces in which Events were read by a round after so many seconds."""
        self.now += seconds
        before = len(self.api.requests)
        await self.reader.round()
        return [path.split("/")[4] for _, path in self.api.requests[before:]]

    def asked(self) -> list[str]:
        """The pods whose Events were read."""
        return [query["fieldSelector"].removeprefix("involvedObject.uid=") for query in self.api.queries]


@pytest.fixture
async def waits(api: FakeApi, client: Client) -> Waits:
    return Waits(api, client)


async def test_a_pod_that_has_had_a_node_for_a_while_is_asked_about_once_and_its_job_learns_it(waits: Waits) -> None:
    """Red where the request names no number of Events."""
    uid = waits.job(pods=3)
    await waits.say("no such map")
    assert await waits.after(0) == []
    assert await waits.after(PATIENCE_SECONDS - 1) == []
    assert await waits.after(1) == ["default"]
    assert waits.api.queries == [{"fieldSelector": f"involvedObject.uid={uid}-0-1", "limit": "50"}]
    seen = waits.world.snapshot(uid, Sources(event_of=waits.reader.event))
    assert seen[1].pod_event == PodEvent(f"{uid}-0-1", "FailedMount", "no such map")
    assert waits.woken == [uid]


@pytest.mark.parametrize(
    ("placed", "seconds_left"), [(PATIENCE_SECONDS + 1, 0), (5, PATIENCE_SECONDS - 5), (-3600, PATIENCE_SECONDS)]
)
async def test_a_new_leader_asks_at_once_about_waiting_pods(waits: Waits, placed: float, seconds_left: float) -> None:
    """`placed`: since when its pods have a node; by a clock that is ahead, in an hour."""
    condition = {
        "type": "PodScheduled",
        "status": "True",
        "lastTransitionTime": timestamp(NOW - timedelta(seconds=placed)),
    }

    def change(raw: Raw) -> Raw:
        raw = with_state(raw, "Pending", CREATING)
        raw["status"]["conditions"] = [condition]
        return raw

    uid = waits.job(pods=0)
    waits.pod(uid, 0, change=change)
    found = [second for second in range(int(PATIENCE_SECONDS) + 1) if await waits.after(min(second, 1))]
    assert found == [seconds_left]


def test_the_reason_is_there_within_half_a_minute() -> None:
    assert PATIENCE_SECONDS + 2 * ROUND_SECONDS <= 30


async def test_a_job_that_waits_on_is_asked_about_less_and_less_often_and_woken_by_news_alone(waits: Waits) -> None:
    uid = waits.job()
    await waits.say("no such map")
    await waits.after(0)
    times = []
    for second in range(1, 2000):
        if await waits.after(1):
            times.append(second)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert pauses[:3] == [30, 60, 120]
    assert set(pauses[3:]) == {120}
    assert waits.woken == [uid]
    await waits.say("another")
    await waits.after(300)
    assert waits.woken == [uid, uid]


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw,
        running,
        lambda raw: waiting(raw, "ImagePullBackOff", "no such image"),
        lambda raw: with_state(raw | {"metadata": raw["metadata"] | {"deletionTimestamp": "2026-01-01T12:00:00Z"}},
                               "Pending", CREATING),
    ],
    ids=["no node", "runs", "says why", "leaves"],
)  # fmt: skip
async def test_of_other_pods_nothing_is_read(waits: Waits, change: Any) -> None:
    uid = waits.job(pods=0)
    waits.pod(uid, 0, change=change)
    for _ in range(5):
        assert await waits.after(PATIENCE_SECONDS) == []


async def test_each_attempt_has_its_own_patience(waits):
    uid = waits.job()
    await waits.say("no such map")
    await waits.after(0)
    assert await waits.after(PATIENCE_SECONDS) == ["default"]
    waits.pod(uid, 0, attempt=2)
    assert await waits.after(PAUSE_SECONDS) == []
    assert waits.reader.event(uid) is None
    assert await waits.after(PATIENCE_SECONDS) == ["default"]
    assert waits.asked() == [f"{uid}-0-1", f"{uid}-0-2"]


async def test_what_was_read_is_forgotten_with_the_pod_that_starts(waits: Waits) -> None:
    uid = waits.job()
    await waits.say("no such map")
    await waits.after(0)
    await waits.after(PATIENCE_SECONDS)
    assert waits.reader.event(uid) is not None
    waits.pod(uid, 0, change=running)
    await waits.after(0)
    assert waits.reader.event(uid) is None


async def test_where_one_pod_has_no_events_the_next_is_asked_and_one_that_has_some_is_kept_to(waits: Waits) -> None:
    uid = waits.job(pods=3)
    await waits.after(0)
    for _ in range(4):
        await waits.after(2 * PAUSE_SECONDS)
    assert waits.asked() == [f"{uid}-{index}-1" for index in (0, 1, 2, 0)]
    await waits.say("no such map")
    for _ in range(3):
        await waits.after(10 * PAUSE_SECONDS)
    assert waits.asked()[4:] == [f"{uid}-1-1"] * 3


async def test_thousands_of_jobs_in_one_namespace_delay_no_other(waits: Waits) -> None:
    """Red without the bound on the requests of a round, and where all jobs stand in one line."""
    for number in range(5 * MOST):
        waits.job("crowded", number)
    await waits.after(0)
    assert await waits.after(PATIENCE_SECONDS) == ["crowded"] * MOST
    waits.job("quiet", 0)
    await waits.after(0)
    asked = await waits.after(PATIENCE_SECONDS)
    assert (len(asked), asked.count("quiet")) == (MOST, 1)
    for _ in range(3):
        await waits.after(1)
    assert len(set(waits.asked())) == 5 * MOST + 1, "all before any twice"


async def test_a_refusal_or_an_answer_without_end_costs_a_sentence_and_nothing_else(waits: Waits) -> None:
    """Red without the bound on bytes."""
    uid = waits.job()
    await waits.say("no such map")
    await waits.after(0)
    refuse = [lambda method, path, body: refusal(403, "Forbidden", "may not list")]
    waits.api.refusals += refuse
    assert await waits.after(PATIENCE_SECONDS) == ["default"]
    assert (waits.reader.event(uid), waits.woken) == (None, [])
    waits.api.refusals.clear()
    await waits.after(10 * PAUSE_SECONDS)
    known = waits.reader.event(uid)
    assert known is not None
    await waits.say("x" * MAX_BYTES, name="two")
    await waits.after(10 * PAUSE_SECONDS)
    assert waits.reader.event(uid) == known, "what is known stays known"
    assert waits.woken == [uid]


async def test_who_does_not_act_reads_nothing(waits: Waits) -> None:
    waits.job()
    await waits.after(0)
    waits.acts = False
    assert await waits.after(PATIENCE_SECONDS) == []
