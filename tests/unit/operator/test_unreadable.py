"""What cannot be read is said once per object, and not faster than anybody reads."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.tolerant import Unreadable
from disttrain_operator.metrics import Figures, Metrics
from disttrain_operator.snapshot import Key
from disttrain_operator.unreadable import MOST_WAITING, SECONDS_BETWEEN, SECONDS_BETWEEN_SAME, UnreadableReports
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi

EVENTS = "/api/v1/namespaces/team/events"


def found(name: str, version: int = 7, namespace: str = "team") -> Unreadable:
    return Unreadable(namespace, name, f"uid-{name}", version, "it nests too deep to be read")


class Reporting:
    """Reports that run, with a clock that stands still between them."""

    def __init__(self, client: Client) -> None:
        self.now, self.acts = 0.0, True
        self.jobs, self.pods = (Cache(group_of=lambda raw: "all") for _ in range(2))
        owners = {"team/uid-a": Key("team", "a", "uid-a")}
        caches = [("disttrainingjobs", self.jobs), ("pods", self.pods)]
        self.reports = UnreadableReports(
            client, lambda: self.acts, caches, owner=owners.get, clock=lambda: self.now, sleep=self._sleep
        )
        self.task = asyncio.create_task(self.reports.run())

    async def _sleep(self, seconds: float) -> None:
        assert seconds == SECONDS_BETWEEN
        self.now += seconds


@pytest.fixture
async def reporting(client: Client) -> AsyncIterator[Reporting]:
    made = Reporting(client)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


def events_of(api: FakeApi) -> list[Raw]:
    return [raw for path, raw in api.objects.items() if path.startswith(EVENTS)]


async def test_an_object_is_named_once_and_again_after_a_while(api, reporting, caplog):
    for version in range(1, 500):
        reporting.jobs.skip(found("a", version))
    reporting.jobs.skip(found("b"))
    await eventually(lambda: len(caplog.records) == 2)
    assert "team/a (version 499) is left alone: it nests too deep" in caplog.messages[0]
    reporting.jobs.skip(found("a", 500))
    reporting.now += SECONDS_BETWEEN_SAME
    reporting.jobs.skip(found("a", 501))
    # An Event follows what the log says.
    await eventually(lambda: len(events_of(api)) == 3)
    assert len(caplog.records) == 3
    events = events_of(api)
    about = [(raw["involvedObject"]["name"], raw["involvedObject"]["resourceVersion"]) for raw in events]
    assert sorted(about) == [("a", "499"), ("a", "501"), ("b", "7")]
    assert {(raw["reason"], raw["type"]) for raw in events} == {("Unreadable", "Warning")}
    assert "it nests too deep to be read. The operator leaves the job" in events[0]["message"]


async def test_what_there_is_no_room_for_is_an_event_with_what_to_do(api: FakeApi, reporting: Reporting) -> None:
    left_out = replace(found("p"), why="there is no room", what_to_do="Delete something", group="team/uid-a")
    reporting.pods.skip(left_out)
    reporting.pods.skip(replace(left_out, uid="of nobody", group="team/unknown"))
    reporting.jobs.skip(replace(left_out, uid="uid-b", name="b"))
    await eventually(lambda: len(events_of(api)) == 2)
    messages = {raw["involvedObject"]["name"]: raw["message"] for raw in events_of(api)}
    rest = "cannot be read: there is no room. The operator leaves the job and its pods as they are. Delete something."
    assert messages == {"a": f"Its `p` (of pods) {rest}", "b": f"This job {rest}"}


async def test_what_has_gone_meanwhile_is_not_spoken_of(reporting: Reporting, caplog: pytest.LogCaptureFixture) -> None:
    reporting.jobs.skip(found("a"))
    reporting.jobs.forget(found("a"))
    reporting.jobs.skip(found("b"))
    await eventually(lambda: caplog.records)
    assert [message.split()[1] for message in caplog.messages] == ["team/b"]


async def test_only_the_leader_posts_events(api, reporting, caplog):
    reporting.acts = False
    reporting.jobs.skip(found("a"))
    await eventually(lambda: caplog.records)
    assert api.asked("POST") == []
    reporting.acts = True
    reporting.reports.begin()
    await eventually(lambda: api.asked("POST") == [EVENTS])


async def test_of_any_number_in_a_namespace_some_are_remembered_and_others_take_turns(reporting, caplog):
    for number in range(30 * MOST_WAITING):
        reporting.pods.skip(found(str(number)))
    assert len(reporting.reports._waiting) == MOST_WAITING
    reporting.jobs.skip(found("one", namespace="another"))
    await eventually(lambda: len(caplog.records) >= 3)
    assert "another/one" in "".join(caplog.messages[:2])
    await eventually(lambda: len(caplog.records) == MOST_WAITING + 1)
    reporting.pods.skip(found("more"))
    await eventually(lambda: "team/more" in caplog.messages[-1])


async def test_their_number_is_a_figure_without_names(reporting: Reporting) -> None:
    reporting.jobs.skip(found("secret-name"))
    metrics = Metrics()
    metrics.registry.register(Figures(dict, dict, reporting.reports.counts))
    text = metrics.text().decode()
    assert 'disttrain_unreadable_objects{kind="disttrainingjobs"} 1.0' in text
    assert 'disttrain_unreadable_objects{kind="pods"} 0.0' in text
    assert "secret-name" not in text
