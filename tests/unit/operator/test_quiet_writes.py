"""What a running job costs besides the questions to its agent: one decision for a write of figures, and nothing in the
rounds that look for what is wrong with jobs.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from disttrain_api.scheduling import GangScheduler
from disttrain_api.status import JobStatus, Progress
from disttrain_operator.decide.decision import CreateSupport, Decision
from disttrain_operator.decide.live import Live
from disttrain_operator.gatekeeper import Gatekeeper
from disttrain_operator.kube.errors import Conflict
from disttrain_operator.leader_addresses import LeaderAddresses
from disttrain_operator.news import figures_alone, same_meaning
from disttrain_operator.pod_events import PodEvents
from disttrain_operator.silent_pods import SilentPods
from disttrain_operator.snapshot import World
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, merge, running
from tests.unit.operator.looking_operator import Operator

PROGRESS = Progress(step=5, total_steps=100, update_time="2026-01-01T12:00:00Z")
LATER = PROGRESS.model_copy(update={"step": 6})
BEGUN = {"number": 1, "startTime": "2026-01-01T11:00:00Z"}


def status_of(operator: Operator) -> JobStatus:
    job = operator.world.job(UID)
    assert job is not None
    return job.status


def look(operator: Operator, *actions: Any, **changes: Any) -> int:
    """How often the job is looked at once something of it has changed, and this is decided each time."""
    status = status_of(operator).model_copy(update=changes)
    operator.decision = Decision("Runs", "", status=status, actions=actions)
    operator.looks = 0
    operator.loop.call(operator.world.wake, UID)
    operator.loop.pass_time(30)
    assert status_of(operator).progress == status.progress
    return operator.looks


def test_a_write_of_figures_leads_to_no_further_decision(operator: Operator) -> None:
    """Red where the answer to the write, or its event, has the job looked at again: each answer of an agent cost two
    decisions."""
    assert look(operator, progress=PROGRESS) == 1
    assert look(operator, progress=LATER) == 1
    operator.loop.call(operator.world.jobs.apply, "MODIFIED", operator.raw)
    operator.loop.pass_time(30)
    assert operator.looks == 1


@pytest.mark.parametrize("changes", [{"ready": "1/200"}, {"ready": "1/200", "progress": PROGRESS}], ids=str)
def test_a_write_of_anything_else_is_looked_at(operator: Operator, changes: dict[str, Any]) -> None:
    assert look(operator, **changes) == 2


def test_a_write_of_figures_beside_which_something_is_done_is_looked_at(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def done(*_: Any, **__: Any) -> bool:
        return True

    monkeypatch.setattr("disttrain_operator.execute.Executor.execute", done)
    assert look(operator, CreateSupport(1, ""), progress=PROGRESS) == 2


def test_what_changes_while_figures_are_written_is_looked_at(operator: Operator) -> None:
    """Red where the wake-ups of that time are dropped, and not only that of the write."""
    write = operator.replace

    async def meanwhile(path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
        pod = merge(running(a_raw_pod(a_job(workers={"replicas": 200}))), {"metadata": {"resourceVersion": "9"}})
        operator.world.pods.observe(pod)
        return await write(path, body, **more)

    operator.replace = meanwhile  # type: ignore[method-assign]
    assert look(operator, progress=PROGRESS) == 2


def test_the_event_of_a_write_of_figures_may_come_before_its_answer(operator: Operator) -> None:
    """Red where only an answer that comes first is known as that of the write."""
    write = operator.replace

    async def event_first(*arguments: Any, **more: Any) -> dict[str, Any]:
        raw = await write(*arguments, **more)
        operator.world.jobs.apply("MODIFIED", raw)
        return raw

    operator.replace = event_first  # type: ignore[method-assign]
    assert look(operator, progress=PROGRESS) == 1


def test_a_version_that_overtakes_the_answer_to_a_write_of_figures_is_looked_at(operator: Operator) -> None:
    """Red where each version that comes while the job is written counts as that of the write."""
    write = operator.replace

    async def overtaken(*arguments: Any, **more: Any) -> dict[str, Any]:
        raw = await write(*arguments, **more)
        operator.raw = operator._next(raw)
        operator.world.jobs.apply("MODIFIED", operator.raw)
        return raw

    operator.replace = overtaken  # type: ignore[method-assign]
    assert look(operator, progress=PROGRESS) == 2


def test_a_write_of_figures_that_is_refused_as_stale_has_the_job_looked_at(operator: Operator) -> None:
    """Red where what came meanwhile, which the refusal is for, is taken for the version of the write."""
    write, refused = operator.replace, list[bool]()

    async def stale(*arguments: Any, **more: Any) -> dict[str, Any]:
        if refused:
            return await write(*arguments, **more)
        refused.append(True)
        operator.raw = operator._next(operator.raw)
        operator.world.jobs.apply("MODIFIED", operator.raw)
        raise Conflict(409, "Conflict", "the object has been modified")

    async def get(*_: Any, **__: Any) -> dict[str, Any]:
        return operator.raw

    operator.replace, operator.get = stale, get  # type: ignore[method-assign, attr-defined]
    assert look(operator, progress=PROGRESS) == 2


def test_a_later_version_of_somebody_else_is_looked_at(operator: Operator) -> None:
    assert look(operator, progress=PROGRESS) == 1
    version = {"metadata": {"resourceVersion": str(int(operator.raw["metadata"]["resourceVersion"]) + 1)}}
    operator.loop.call(operator.world.jobs.apply, "MODIFIED", merge(operator.raw, version))
    operator.loop.pass_time(30)
    assert operator.looks == 2


def test_statuses_that_differ_in_figures_and_times_alone() -> None:
    status = a_job().status.model_copy(update={"progress": PROGRESS})
    written = status.model_copy(update={"progress": PROGRESS.model_copy(update={"update_time": "later"})})
    assert same_meaning(written, status)
    assert not same_meaning(status.model_copy(update={"progress": LATER}), status)
    assert not same_meaning(status.model_copy(update={"progress": None}), status)
    assert figures_alone(status.model_copy(update={"progress": LATER}), status)
    assert not figures_alone(status.model_copy(update={"progress": LATER, "attempt": 2}), status)


Rounds = Callable[[World], Any]


async def announced(world: World) -> None:
    async with asyncio.TaskGroup() as tasks:
        await LeaderAddresses(world, str, lambda: True).round(tasks)


async def gated(world: World) -> None:
    gate = Gatekeeper(world, lambda uid: None)
    for cache in (gate.nodes, gate.pods):
        cache.replace([], 1)
    await gate.run_cycle()
    await gate.close()


async def silent(world: World) -> None:
    await SilentPods(world, str, lambda uid: Live("uid", 1, None), lambda uid: None, lambda: True).round(refuse)


async def awaited(world: World) -> None:
    await PodEvents(None, world, lambda uid: None, lambda: True).round()  # type: ignore[arg-type]


async def refuse(*_: Any) -> bytes:
    raise AssertionError("nobody is asked")


def a_world(monkeypatch: pytest.MonkeyPatch, *, runs: bool) -> tuple[World, list[str]]:
    """A job of two pods that has been looked at, and what is read of it from then on."""
    world, read = World(), list[str]()
    for cache in (world.jobs, world.pods, world.services):
        cache.replace([], 1)
    policy = {"schedulingPolicy": {"gangScheduler": GangScheduler.GATE.value}}
    attempt = BEGUN | ({"runningTime": "2026-01-01T11:01:00Z"} if runs else {"replacements": [REPLACED]})
    status = {"attempt": 1, "attempts": [attempt]}
    raw = a_raw_job(workers={"replicas": 2}, runPolicy=policy, status=status)
    world.jobs.observe(merge(raw, {"metadata": {"resourceVersion": "2"}}))
    for index in range(2):
        pod = a_raw_pod(a_job(workers={"replicas": 2}), index=index)
        world.pods.observe(merge(running(pod) if runs else pod, {"metadata": {"resourceVersion": "2"}}))
    world.snapshot(UID)
    for name in ("job", "last_seen"):
        known = getattr(world, name)
        monkeypatch.setattr(world, name, lambda uid, known=known: (read.append(uid), known(uid))[1])
    return world, read


REPLACED = {"pod": "digits-00000-worker-0-a1", "uid": "former", "time": "2026-01-01T12:00:00Z", "reason": "PodLost"}


@pytest.mark.parametrize("rounds", [announced, gated, silent, awaited])
async def test_nothing_is_read_of_a_job_that_simply_runs(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where a round reads each job or its pods: 10,000 took seconds of each minute."""
    world, read = a_world(monkeypatch, runs=True)
    await rounds(world)
    assert read == []


@pytest.mark.parametrize("rounds", [announced, gated, silent, awaited])
async def test_a_job_of_which_something_is_to_be_done_is_read(rounds: Rounds, monkeypatch: pytest.MonkeyPatch) -> None:
    world, read = a_world(monkeypatch, runs=False)
    await rounds(world)
    assert UID in read
