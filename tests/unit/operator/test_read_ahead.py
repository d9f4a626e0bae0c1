"""Long specs are read in a thread, one at a time: the event loop renews leases and answers probes meanwhile."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from disttrain_operator import reconcile
from disttrain_operator.decide.observed import Job
from disttrain_operator.kept_job import read
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.client import Client
from disttrain_operator.snapshot import Key
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


@dataclass
class Look:
    """A look at a job with a long spec, which is being read."""

    shell: Shell
    reader: Reader
    task: asyncio.Task[None]

    async def end(self) -> None:
        self.reader.go_on.set()
        await self.task


@pytest.fixture
async def look(api: FakeApi, client: Client, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Look]:
    shell, reader = await a_shell(api, client), Reader(monkeypatch)
    spec = shell.job()["spec"]
    spec["workers"]["template"] = {"spec": {"tolerations": LONG}}
    shell.world.jobs.observe(await api.put(f"{JOBS}/digits", spec=spec))
    task = asyncio.create_task(shell.reconcile())
    await reader.begun.wait()
    yield Look(shell, reader, task)
    reader.go_on.set()


async def test_a_long_spec_is_read_beside_the_loop(look: Look) -> None:
    # The loop turns, and the spec is not read yet.
    assert not look.task.done()
    await look.end()
    assert look.shell.pods()
    assert threading.get_ident() not in look.reader.threads
    # Once for all looks at this spec.
    await look.shell.reconcile()
    assert len(look.reader.threads) == 1


async def test_a_version_that_is_old_when_it_is_read_does_not_count(look: Look) -> None:
    spec = {**look.shell.job()["spec"], "workers": {"replicas": 1}}
    look.shell.world.jobs.observe(await look.shell.api.put(f"{JOBS}/digits", spec=spec))
    await look.end()
    assert len(look.shell.pods()) == 1


async def test_who_leads_no_more_when_it_is_read_does_nothing(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look.shell.reconciler, "_active", lambda: False)
    await look.end()
    assert look.shell.pods() == []


async def test_a_short_spec_waits_for_no_long_one(look: Look) -> None:
    raw = await look.shell.api.put(f"{JOBS}/short", spec={**look.shell.job()["spec"], "workers": {"replicas": 1}})
    look.shell.world.jobs.observe(raw)
    await look.shell.reconciler.reconcile(Key("default", "short", raw["metadata"]["uid"]))
    assert [name for name in look.shell.pods() if name.startswith("short-")]
    await look.end()
