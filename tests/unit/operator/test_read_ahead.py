"""Long specs are read in a thread, one at a time: the event loop renews leases and answers probes meanwhile."""

import asyncio
import threading
from typing import Any

import pytest

from disttrain_operator import reconcile
from disttrain_operator.decide.observed import Job
from disttrain_operator.kept_job import read
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.client import Client
from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.test_reconcile import JOBS, Shell, a_shell

LONG = [{"key": f"example.com/pool-{number}", "operator": "Exists"} for number in range(2_000)]


class Reader:
    """Reads as `read` does, once it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self.threads = threading.Event(), list[int]()
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(reconcile, "read", self)

    def __call__(self, raw: Raw, **others: Any) -> Job:
        self.threads.append(threading.get_ident())
        self._loop.call_soon_threadsafe(self.begun.set)
        self.go_on.wait()
        return read(raw, **others)


async def with_a_long_spec(api: FakeApi, client: Client) -> Shell:
    shell = await a_shell(api, client)
    spec = shell.job()["spec"]
    spec["workers"]["template"] = {"spec": {"tolerations": LONG}}
    shell.world.jobs.observe(await api.put(f"{JOBS}/digits", spec=spec))
    return shell


async def test_a_long_spec_is_read_beside_the_loop(
    api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, reader = await with_a_long_spec(api, client), Reader(monkeypatch)
    looking = asyncio.create_task(shell.reconcile())
    await reader.begun.wait()
    # The loop turns, and the spec is not read yet.
    assert not looking.done()
    reader.go_on.set()
    await looking
    assert shell.pods()
    assert threading.get_ident() not in reader.threads
    # Once for all looks at this spec.
    await shell.reconcile()
    assert len(reader.threads) == 1


async def test_a_version_that_is_old_when_it_is_read_does_not_count(
    api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, reader = await with_a_long_spec(api, client), Reader(monkeypatch)
    looking = asyncio.create_task(shell.reconcile())
    await reader.begun.wait()
    spec = {**shell.job()["spec"], "workers": {"replicas": 1}}
    shell.world.jobs.observe(await api.put(f"{JOBS}/digits", spec=spec))
    reader.go_on.set()
    await looking
    assert len(shell.pods()) == 1


async def test_who_leads_no_more_when_it_is_read_does_nothing(
    api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, reader = await with_a_long_spec(api, client), Reader(monkeypatch)
    leads = [True]
    monkeypatch.setattr(shell.reconciler, "_active", lambda: leads[0])
    looking = asyncio.create_task(shell.reconcile())
    await reader.begun.wait()
    leads[0] = False
    reader.go_on.set()
    await looking
    assert shell.pods() == []


async def test_a_short_spec_waits_for_no_long_one(
    api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell, reader = await with_a_long_spec(api, client), Reader(monkeypatch)
    looking = asyncio.create_task(shell.reconcile())
    await reader.begun.wait()
    spec = {**shell.job()["spec"], "workers": {"replicas": 1}}
    raw = await api.put(f"{JOBS}/short", spec=spec)
    shell.world.jobs.observe(raw)
    await shell.reconciler.reconcile(reconcile.Key("default", "short", raw["metadata"]["uid"]))
    assert [name for name in shell.pods() if name.startswith("short-")]
    reader.go_on.set()
    await looking
