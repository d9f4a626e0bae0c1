"""A status that the API server refuses is written again without what may be the reason, and the job goes on."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from disttrain_api.bounds import MAX_MESSAGE_BYTES
from disttrain_operator import reconcile
from disttrain_operator.decide.decision import Decision
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import ServerTrouble
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import StatusRefused
from disttrain_operator.snapshot import Key
from tests.builders import a_report, ended
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, Raw, refusal
from tests.unit.operator.test_reconcile import JOBS, Shell, a_shell, refuse

REFUSALS = {
    "422": lambda: refusal(422, "Invalid", "status.progress.loss: Invalid value\n\x1b[31m" + "x" * 100_000),
    "413": lambda: refusal(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728"),
    "500": lambda: refusal(500, "InternalError", "etcdserver: request is too large"),
}


@pytest.fixture
async def shell(api: FakeApi, client: Client) -> Shell:
    return await a_shell(api, client, workers=2, policy={"restartBackoffSeconds": 0})


def refuses(answer: Callable[[], web.Response], when: Callable[[Raw], bool]) -> Callable[..., web.Response | None]:
    """Refuses statuses of which `when` is true."""

    def decide(method: str, path: str, body: Raw | None) -> web.Response | None:
        return answer() if method == "PUT" and when((body or {})["status"]) else None

    return decide


async def fail_with_a_report(api: FakeApi, shell: Shell) -> None:
    """The first attempt runs and fails; its pods report progress."""
    await shell.reconcile()
    job = shell.world.job(shell.key.uid)
    assert job is not None
    for path in [path for path in api.objects if "/pods/" in path]:
        raw = api.objects[path]
        done = ended({**raw, "status": {}}, 1, report=a_report(50, checkpoint=40))
        shell.world.pods.observe(await api.put(path, spec=done["spec"], status=done["status"]))


@pytest.mark.parametrize("answer", REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_refused_status_is_written_without_the_reports_and_the_job_goes_on(
    api: FakeApi, shell: Shell, answer: Callable[[], web.Response]
) -> None:
    """Red where the same status is written again."""
    api.refusals.append(refuses(answer, lambda status: "progress" in status))
    await fail_with_a_report(api, shell)
    await shell.reconcile()
    status = shell.job()["status"]
    assert status["attempt"] == 2
    assert status["attempts"][0]["verdict"]["exitCode"] == 1
    assert "progress" not in status
    message = shell.running()["message"]
    assert "the API server refused a part of the status" in message
    assert message.isprintable()
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    deleted = api.asked("DELETE", "/pods/")
    assert len(deleted) == 2  # what the decision asked for is done
    await shell.reconcile()
    # Nothing is written over and over.
    version = shell.job()["metadata"]["resourceVersion"]
    for _ in range(3):
        await shell.reconcile()
    assert shell.job()["metadata"]["resourceVersion"] == version
    assert len(shell.pods()) == 2


async def test_once_nothing_is_refused_any_more_the_status_is_whole_again(api: FakeApi, shell: Shell) -> None:
    api.refusals.append(refuses(REFUSALS["422"], lambda status: "progress" in status))
    await fail_with_a_report(api, shell)
    await shell.reconcile()
    api.refusals.clear()
    await shell.reconcile()
    assert shell.job()["status"]["progress"]["step"] == 50
    assert "refused" not in json.dumps(shell.job()["status"]["conditions"])


async def test_where_even_the_minimal_status_is_refused_nothing_is_done(api: FakeApi, shell: Shell) -> None:
    await fail_with_a_report(api, shell)
    before = shell.job()["status"]
    api.refusals.append(refuses(REFUSALS["422"], lambda status: True))
    with pytest.raises(StatusRefused):
        await shell.reconcile()
    assert shell.job()["status"] == before
    assert api.asked("DELETE") == []
    assert [path for path in api.asked("PUT") if path.startswith(JOBS)]


class ImpatientQueue(WorkQueue[Key]):
    """Hands out in a moment what is to be left alone, and knows for how long that was to be."""

    def __init__(self) -> None:
        super().__init__(first_delay=0.001, max_delay=0.001)
        self.left: list[float] = []
        self._asked = 0.0

    def hold(self, key: Key, seconds: float, *, urgent_seconds: float | None = None) -> None:
        self._asked = seconds
        super().hold(key, 0.0)

    def retry(self, key: Key, at_least: float = 0.0) -> None:
        self.left.append(self._asked)
        super().retry(key, at_least)


@asynccontextmanager
async def workers(shell: Shell) -> AsyncIterator[None]:
    """As many as the operator has."""
    working = [asyncio.create_task(shell.reconciler.work()) for _ in range(16)]
    try:
        yield
    finally:
        for task in working:
            task.cancel()
        ended = await asyncio.gather(*working, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log has of warnings about the job."""
    return [entry.getMessage() for entry in caplog.records if "digits" in entry.getMessage()]


def events(api: FakeApi) -> list[Raw]:
    return [raw for path, raw in api.objects.items() if "/events/" in path]


@pytest.mark.parametrize("answer", REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_job_that_can_have_no_status_costs_two_writes_whoever_wakes_it(
    api: FakeApi, client: Client, answer: Callable[[], web.Response], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where such a job is only tried again."""
    monkeypatch.setattr(reconcile, "CRASH_SECONDS", 3600.0)
    monkeypatch.setattr(reconcile, "MAX_CRASH_SECONDS", 3600.0)
    shell = await a_shell(api, client)
    api.refusals.append(refuses(answer, lambda status: True))
    async with workers(shell):
        shell.queue.add(shell.key)
        await eventually(lambda: events(api))
        for _ in range(50):
            shell.queue.add(shell.key)
            await asyncio.sleep(0)
        api.refusals.clear()
        raw = await api.put(f"{JOBS}/other", spec=shell.job()["spec"])
        shell.world.jobs.observe(raw)
        shell.queue.add(Key("default", "other", raw["metadata"]["uid"]))
        await eventually(lambda: len(shell.pods()) == 3)
    assert len(api.asked("PUT", "/digits/")) == 2, "the status, and the minimal one"
    assert "status" not in shell.job()


async def test_a_job_that_can_have_no_status_is_left_alone_longer_and_longer_and_is_one_event(
    api: FakeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    queue = ImpatientQueue()
    shell = await a_shell(api, client, queue=queue)
    api.refusals.append(refuses(REFUSALS["500"], lambda status: True))
    with caplog.at_level(logging.INFO):
        async with workers(shell):
            queue.add(shell.key)
            await eventually(lambda: len(queue.left) >= 20 and events(api))
    assert queue.left[:7] == [5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 120.0]
    text = "the API server refuses every status of it, so nothing is done for it: etcdserver: request is too large"
    assert warnings(caplog) == [f"default/digits: {text}"]
    (event,) = events(api)
    assert (event["type"], event["reason"]) == ("Warning", "InvalidSpec")
    assert event["message"] == (
        "The API server refuses every status of this job, so the operator does nothing for it: etcdserver: request is"
        " too large. The job is larger than the API server can store: delete it, or shorten its `spec` and `metadata`."
    )


async def test_another_spec_is_another_event_and_one_that_is_taken_goes_on(
    api: FakeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    queue = ImpatientQueue()
    shell = await a_shell(api, client, queue=queue)
    refusing = refuses(REFUSALS["422"], lambda status: True)
    api.refusals.append(refusing)
    with caplog.at_level(logging.WARNING):
        async with workers(shell):
            queue.add(shell.key)
            await eventually(lambda: events(api) and len(queue.left) >= 3)
            raw = shell.job()
            raw["metadata"]["generation"] = 2
            shell.world.jobs.observe(await api.put(f"{JOBS}/digits"))
            await eventually(lambda: len(events(api)) == 2)
            assert {event["reason"] for event in events(api)} == {"OperatorError"}
            api.refusals.remove(refusing)
            await eventually(lambda: len(shell.pods()) == 3 and not queue.failures(shell.key))
    assert sum("refuses every status" in text for text in warnings(caplog)) == 2
    assert shell.job()["status"]["attempt"] == 1


async def test_a_server_in_trouble_is_asked_for_no_minimal_status(api: FakeApi, shell: Shell) -> None:
    asked = list[Raw]()

    def trouble(method: str, path: str, body: Raw | None) -> web.Response | None:
        if method != "PUT":
            return None
        asked.append((body or {})["status"])
        return refusal(500, "InternalError", "etcdserver: request timed out")

    api.refusals.append(trouble)
    with pytest.raises(ServerTrouble, match="request timed out"):
        await shell.reconcile()
    assert asked
    assert all(status == asked[0] for status in asked), "the same one again and again"
    assert events(api) == []


async def test_a_pod_that_is_too_large_is_asked_for_once_a_round(api: FakeApi, shell: Shell) -> None:
    api.refusals.append(refuse("/pods", REFUSALS["500"]))
    await shell.reconcile()
    assert len(api.asked("POST", "/pods")) <= 2, "no refusal of it is tried again as an outage would be"
    await shell.reconcile()
    assert shell.running()["reason"] == "InvalidPod"
    assert "etcdserver: request is too large" in shell.running()["message"]


async def test_an_error_that_stays_for_days_ends_no_worker(api: FakeApi, client: Client) -> None:
    """Two to the power of its number is more than a float holds."""

    def breaks(*_: object) -> Decision:
        raise ValueError("nobody thought of this")

    queue = ImpatientQueue()
    shell = await a_shell(api, client, queue=queue, decide=breaks)
    for _ in range(1100):
        queue.retry(shell.key)
    count = len(queue.left)
    async with workers(shell):
        queue.add(shell.key)
        await eventually(lambda: len(queue.left) > count + 1)
    assert queue.left[-1] == 120.0
