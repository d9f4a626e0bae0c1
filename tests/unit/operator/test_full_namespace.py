"""Jobs whose pods a quota refuses: what they ask for, and when they get in."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import Decision
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.kube.client import Client
from disttrain_operator.metrics import Metrics
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.refused import FEW, SECONDS_BETWEEN_TRIES, WOKEN_AT_ONCE, WORKERS_IN_A_CROWD, Refused
from disttrain_operator.snapshot import Key
from disttrain_operator.wakeups import Wakeups
from tests.builders import ended
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


@pytest.mark.parametrize("request_", ["ASK /pods", "POST /events"])
async def test_a_job_that_changes_meanwhile_is_decided_upon_as_it_is_then(
    api: FakeApi, client: Client, request_: str
) -> None:
    """While it is asked about, and after its status. Red where it then rests as what it was."""
    shell = await a_crowded_shell(api, client)

    def suspend(method: str, path: str, body: Raw | None) -> web.Response | None:
        if shell.writes()[-1] == request_:
            job = shell.job()
            job["spec"]["suspend"] = True
            api.version += 1
            job["metadata"] |= {"resourceVersion": str(api.version), "generation": 2}
            shell.world.jobs.observe(job)
        return None

    api.refusals.insert(0, suspend)
    await shell.reconcile()
    await shell.reconcile()
    assert shell.job()["status"]["phase"] == "Suspended"
    assert api.asked("POST", "/pods") == []


async def test_a_job_elsewhere_is_served_beside_the_backlog_of_a_namespace(api: FakeApi, client: Client) -> None:
    """It waits for one of their turns. Red where the queue has one group for all namespaces."""
    refused = Refused()
    queue = by_turns(refused)
    shell = await a_shell(api, client, workers=2, queue=queue, refused=refused)
    api.refusals.append(refuse("/namespaces/default/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    await crowd(shell, BACKLOG)
    async with working(shell, WORKERS):
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


async def test_jobs_that_wait_cost_no_decision_before_their_turn_whatever_wakes_them(
    api: FakeApi, client: Client
) -> None:
    """Red where they are decided upon at each look, or once more after the write of their status."""
    now, decided = [100.0], Counter[str]()
    refused = Refused(clock=lambda: now[0])

    def decide_counted(job: Job, observed: Observed, at: datetime) -> Decision:
        decided[job.uid] += 1
        return decide(job, observed, at)

    shell = await a_shell(api, client, workers=1, queue=by_turns(refused), refused=refused, decide=decide_counted)
    shell.world.listener = Wakeups(shell.queue, refused, Metrics())
    make_crowded(shell.reconciler, 100)
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    keys = await crowd(shell, 30)
    handed_out = shell.queue.handed_out

    async def look_at_all() -> None:
        before = len(handed_out)
        for key in keys:
            shell.queue.add(key)
        await eventually(lambda: set(keys) <= set(handed_out[before:]) and not shell.queue.ready)

    async with working(shell, WORKERS):
        await eventually(lambda: refused.count == 100 + len(keys) and len(api.asked("PUT", "/status")) == len(keys))
        for _ in range(3):
            await look_at_all()
        assert set(decided.values()) == {2}, "before the question, and after it"
        # All times have passed: one has its turn, and the others get times of their own.
        now[0] += 3600
        for turns in (1, 2):
            await look_at_all()
            await eventually(lambda turns=turns: decided.total() == 2 * (len(keys) + turns))
            assert len(api.asked("ASK", "/pods")) == len(keys) + turns
            now[0] += 2 * SECONDS_BETWEEN_TRIES
    assert len(api.asked("PUT", "/status")) == len(keys)


async def test_a_job_that_waits_for_its_turn_ends_when_its_time_is_over(api: FakeApi, client: Client) -> None:
    """Red where a job that waits is left alone until its turn."""
    now = [datetime(2026, 1, 1, tzinfo=UTC)]
    shell = await a_shell(api, client, policy={"startingDeadlineSeconds": 60}, now=lambda: now[0])
    make_crowded(shell.reconciler, 1000)
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    for seconds, phase in ((0, "Pending"), (59, "Pending"), (2, "Failed")):
        now[0] += timedelta(seconds=seconds)
        await shell.reconcile()
        assert shell.job()["status"]["phase"] == phase
    assert shell.running()["reason"] == "QuotaExceeded"


async def test_a_job_that_waits_for_its_turn_is_looked_at_when_it_changes(api: FakeApi, client: Client) -> None:
    """Red where a job that waits is left alone until its turn."""
    shell = await a_crowded_shell(api, client)
    await shell.reconcile()
    shell.world.jobs.observe(await api.put(f"{JOBS}/digits", spec={**shell.job()["spec"], "suspend": True}))
    await shell.reconcile()
    assert shell.job()["status"]["phase"] == "Suspended"


async def a_refused_shell(api: FakeApi, client: Client, room: int) -> Shell:
    """Few wait, so a job of three pods was not asked about ahead: that it is refused comes after the decision."""
    shell = await a_shell(api, client, workers=3, queue=WorkQueue[Key](first_delay=3600, max_delay=3600))
    make_crowded(shell.reconciler, FEW - 1)
    full = refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods"))
    api.refusals.append(lambda method, path, body: full(method, path, body) if len(shell.pods()) >= room else None)
    await shell.reconcile()
    assert len(shell.pods()) == room
    await shell.reconcile()
    return shell


async def test_a_job_says_that_it_is_refused_before_it_rests(api: FakeApi, client: Client) -> None:
    """Red where it rests on a decision that knew nothing of the refusal."""
    shell = await a_refused_shell(api, client, room=0)
    assert shell.running()["reason"] == "QuotaExceeded"


async def test_a_job_that_has_a_part_of_its_pods_does_not_rest(api: FakeApi, client: Client) -> None:
    """Red where its pods are not looked at while it waits for the others."""
    shell = await a_refused_shell(api, client, room=1)
    path = next(path for path in api.objects if "/pods/" in path)
    shell.world.pods.observe(await api.put(path, status=ended({**api.objects[path], "status": {}}, 1)["status"]))
    await shell.reconcile()
    assert shell.job()["status"]["attempts"][0]["verdict"]


async def test_looks_that_ask_nothing_do_not_stand_before_what_happens_elsewhere(api: FakeApi, client: Client) -> None:
    """Red where a worker goes on to the next key without a turn of the loop."""
    refused = Refused()
    queue = by_turns(refused)
    shell = await a_shell(api, client, queue=queue, refused=refused, managed_by="example.com/another")
    make_crowded(shell.reconciler, 100)
    await crowd(shell, BACKLOG)
    elsewhere = Key("quiet", "digits", "uid")
    async with working(shell, WORKERS):
        # What the loop hears of while they look.
        asyncio.get_running_loop().call_soon(queue.add, elsewhere)
        await eventually(lambda: elsewhere in queue.handed_out)
        assert queue.handed_out.index(elsewhere) <= WORKERS_IN_A_CROWD
        await eventually(lambda: len(queue.handed_out) > BACKLOG)


async def crowd(shell: Shell, number: int) -> list[Key]:
    """So many jobs in the same namespace, which wait for a look."""
    keys = []
    for each in range(number):
        raw = await shell.api.put(f"{JOBS}/crowd-{each}", spec=shell.job()["spec"])
        shell.world.jobs.observe(raw)
        keys.append(Key("default", f"crowd-{each}", raw["metadata"]["uid"]))
        shell.queue.add(keys[-1])
    return keys


@asynccontextmanager
async def working(shell: Shell, workers: int) -> AsyncIterator[None]:
    """So many workers look at what is due."""
    tasks = [asyncio.create_task(shell.reconciler.work()) for _ in range(workers)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


class Noted(WorkQueue[Key]):
    """Remembers what it has handed out."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.handed_out: list[Key] = []

    async def get(self) -> Key:
        key = await super().get()
        self.handed_out.append(key)
        return key


def by_turns(refused: Refused) -> Noted:
    """The queue of the operator's process."""
    return Noted(group_of=lambda key: key.namespace, limit=lambda namespace: refused.share(namespace, WORKERS))


async def work_off(shell: Shell) -> None:
    """All that is due now, one after the other."""
    while shell.queue.ready:
        key = await shell.queue.get()
        await shell.reconciler.reconcile(key)
        shell.queue.done(key)
