"""Jobs whose pods a quota refuses: what they ask for, and when they get in."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from aiohttp import web

from disttrain_operator.kube.client import Client
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.refused import FEW, WOKEN_AT_ONCE, Refused
from disttrain_operator.snapshot import Key
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, Raw, refusal
from tests.unit.operator.test_reconcile import CHILDREN, JOBS, Shell, a_shell, refuse

WORKERS = 16
BACKLOG = 200


async def test_jobs_of_a_full_namespace_try_again_a_few_at_a_time(api: FakeApi, client: Client) -> None:
    """A pod that goes costs a few requests, not one for each job that waits."""
    never_by_itself = WorkQueue[Key](first_delay=3600, max_delay=3600)
    shell = await a_shell(api, client, workers=1, queue=never_by_itself)
    keys = [shell.key]
    for number in range(20):
        raw = await api.put(f"{JOBS}/more-{number}", spec=shell.job()["spec"])
        shell.world.jobs.observe(raw)
        keys.append(Key("default", f"more-{number}", raw["metadata"]["uid"]))
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    for key in keys:
        await shell.reconciler.reconcile(key)
    assert list(shell.queue) == [], "all wait for their back-off"
    shell.api.requests.clear()
    shell.free()
    assert list(shell.queue) == keys[:WOKEN_AT_ONCE]
    await work_off(shell)
    assert len(api.asked("ASK", "/pods")) == WOKEN_AT_ONCE
    assert api.asked("POST", "/pods") == []
    api.refusals.clear()
    shell.free()
    assert list(shell.queue) == keys[WOKEN_AT_ONCE : 2 * WOKEN_AT_ONCE], "in turn"
    await work_off(shell)
    assert len(shell.pods()) == len(keys), "who gets in wakes the next ones"
    assert shell.reconciler.refused.count == 0


async def test_a_job_of_a_full_namespace_does_not_ask_before_its_turn(api: FakeApi, client: Client) -> None:
    """Whoever changes it: the condition says that it is refused, and nothing is asked."""
    shell = await a_shell(api, client, workers=1, queue=WorkQueue[Key](first_delay=3600, max_delay=3600))
    for number in range(100):
        shell.reconciler.refused.again(Key("default", f"other-{number}", f"uid-{number}"), 1)
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    await shell.reconcile()
    assert len(api.asked("ASK", "/pods")) == 1
    for _ in range(3):
        await shell.reconcile()
    assert shell.running()["reason"] == "QuotaExceeded"
    assert len(api.asked("ASK", "/pods")) == 1
    assert api.asked("POST", "/pods") == []
    assert list(shell.queue) == [], "it comes again by itself"
    api.refusals.clear()
    for _ in range(101):
        shell.free()
    await shell.reconcile()
    assert len(shell.pods()) == 1


async def a_crowded_shell(api: FakeApi, client: Client, others: int = 100) -> Shell:
    """In a namespace that lets no pod in."""
    shell = await a_shell(api, client, workers=3, queue=WorkQueue[Key](first_delay=3600, max_delay=3600))
    make_crowded(shell.reconciler, others)
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    return shell


def make_crowded(reconciler: Reconciler, others: int) -> None:
    for number in range(others):
        reconciler.refused.again(Key("default", f"other-{number}", f"uid-{number}"), 1)


async def test_a_job_in_a_crowded_namespace_costs_a_question_a_status_and_an_event(
    api: FakeApi, client: Client
) -> None:
    """Thousands may be made: each Service would be several objects of the cluster's own, too."""
    shell = await a_crowded_shell(api, client)
    for _ in range(3):
        await shell.reconcile()
    assert shell.writes() == ["ASK /pods", "PUT /digits/status", "POST /events"]
    assert shell.running()["reason"] == "QuotaExceeded"
    assert shell.job()["status"]["phase"] == "Pending"
    (event,) = (raw for path, raw in api.objects.items() if "/events/" in path)
    assert event["reason"] == "QuotaExceeded"
    assert list(shell.queue) == [], "it comes again by itself"


async def test_a_job_that_a_crowded_namespace_has_room_for_gets_all_it_wants(api: FakeApi, client: Client) -> None:
    shell = await a_crowded_shell(api, client)
    await shell.reconcile()
    api.refusals.clear()
    for _ in range(102):
        shell.free()
    api.requests.clear()
    await shell.reconcile()
    assert Counter(shell.writes())["ASK /pods"] == 1
    assert len(shell.pods()) == 3
    assert len(api.asked("POST", f"{CHILDREN}/services")) == len(api.asked("POST", f"{CHILDREN}/secrets")) == 1


async def test_where_few_wait_nothing_is_asked_ahead(api: FakeApi, client: Client) -> None:
    shell = await a_crowded_shell(api, client, others=FEW)
    await shell.reconcile()
    assert api.asked("ASK") == []


@pytest.mark.parametrize("code", [400, 403, 404, 500])
async def test_where_nobody_can_say_it_ahead_the_job_is_begun(api: FakeApi, client: Client, code: int) -> None:
    """Webhooks may take no question, and what else is wrong with a pod is said of the pod."""
    shell = await a_crowded_shell(api, client)
    api.refusals.clear()

    def refuse_questions(method: str, path: str, body: Raw | None) -> web.Response | None:
        asks = api.requests[-1][0] == "ASK"
        return refusal(code, "Forbidden", "does not support dry run") if asks else None

    api.refusals.append(refuse_questions)
    await shell.reconcile()
    assert api.asked("ASK")
    assert len(shell.pods()) == 3


async def test_a_replica_that_takes_over_writes_no_status_of_waiting_jobs(api: FakeApi, client: Client) -> None:
    shell = await a_crowded_shell(api, client)
    await shell.reconcile()
    shell.world.problems.clear()
    shell.reconciler.refused.forget_all()
    make_crowded(shell.reconciler, 100)
    api.requests.clear()
    await shell.reconcile()
    assert shell.writes() == ["ASK /pods"]


async def test_a_job_that_changes_meanwhile_is_decided_upon_as_it_is_then(api: FakeApi, client: Client) -> None:
    shell = await a_crowded_shell(api, client)
    job = shell.job()

    def suspend(method: str, path: str, body: Raw | None) -> web.Response | None:
        if api.requests[-1][0] == "ASK":
            job["spec"]["suspend"] = True
            api.version += 1
            job["metadata"] |= {"resourceVersion": str(api.version), "generation": 2}
            shell.world.jobs.observe(job)
        return None

    api.refusals.insert(0, suspend)
    await shell.reconcile()
    assert shell.job()["status"]["phase"] == "Suspended"
    assert api.asked("POST", "/pods") == []


async def test_a_job_elsewhere_is_served_beside_the_backlog_of_a_namespace(api: FakeApi, client: Client) -> None:
    """It waits for one of their turns. Red where the queue has one group for all namespaces."""
    refused = Refused()
    queue = Noted(group_of=lambda key: key.namespace, limit=lambda namespace: refused.share(namespace, WORKERS))
    shell = await a_shell(api, client, workers=2, queue=queue, refused=refused)
    api.refusals.append(refuse("/namespaces/default/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    for number in range(BACKLOG):
        raw = await api.put(f"{JOBS}/crowd-{number}", spec=shell.job()["spec"])
        shell.world.jobs.observe(raw)
        queue.add(Key("default", f"crowd-{number}", raw["metadata"]["uid"]))
    workers = [asyncio.create_task(shell.reconciler.work()) for _ in range(WORKERS)]
    try:
        await eventually(lambda: refused.count > 2 * FEW)
        elsewhere = JOBS.replace("default", "quiet")
        raw = await api.put(f"{elsewhere}/digits", spec=shell.job()["spec"])
        shell.world.jobs.observe(raw)
        key = Key("quiet", "digits", raw["metadata"]["uid"])
        handed_out = len(queue.handed_out)
        queue.add(key)
        await eventually(lambda: sum("/namespaces/quiet/pods/" in path for path in api.objects) == 2)
        waited = queue.handed_out[handed_out : queue.handed_out.index(key)]
        assert len(waited) <= 1, "more than one turn of the crowd's"
        assert refused.count < BACKLOG / 2, "the backlog was worked off first"
        await eventually(lambda: refused.count == BACKLOG)
    finally:
        for worker in workers:
            worker.cancel()


class Noted(WorkQueue[Key]):
    """Remembers what it has handed out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.handed_out: list[Key] = []

    async def get(self) -> Key:
        key = await super().get()
        self.handed_out.append(key)
        return key


async def work_off(shell: Shell) -> None:
    """All that is due now, one after the other."""
    while shell.queue.ready:
        key = await shell.queue.get()
        await shell.reconciler.reconcile(key)
        shell.queue.done(key)
