"""Worker 0's replacement announces its address to the other agents, whatever listens where their names lead."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang import announce as module
from disttrain_agent.gang.announce import announce, host_of
from disttrain_agent.http_api import protocols
from disttrain_agent.limits import Admission, Limits
from disttrain_agent.look import Look
from disttrain_agent.processes import Processes
from disttrain_agent.reports import Reports
from disttrain_api.leader_address import leader_path
from disttrain_api.names import TOKEN_FILE, TOKEN_HEADER, Role
from disttrain_operator.agent_http import NoAnswer, exchange
from disttrain_operator.plan.environment import address
from disttrain_operator.plan.site import Site
from tests.builders import a_job
from tests.unit.agent.test_gang_strangers import until
from tests.unit.agent.test_http_api import JOB_TOKEN, TOKEN, a_port

HERE = "127.0.0.1"


class Others:
    """The other workers of a job of four, each at an address of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = folder / "job.json"
        config.with_name(TOKEN_FILE).write_text(JOB_TOKEN)
        self.port, self.heard = a_port(), dict[int, list[tuple[str, int]]]()
        self.pod = PodEnvironment(
            0, 1, "job-00000-worker-0-a3.job-00000", config, folder, 1.0, {}, job_uid="uid-1", attempt=3, workers=4,
            agent_port=self.port, replacement=2,
        )  # fmt: skip
        self.servers: list[asyncio.Server] = []
        self.seen = dict[int, list[bytes]]()
        """Requests that strangers have read."""
        monkeypatch.setattr(module, "addresses", self.look_up)
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.01)

    async def look_up(self, host: str, port: int) -> list[str]:
        worker = next(worker for worker in range(1, 4) if host == host_of(self.pod, worker))
        return [f"127.0.0.{10 + worker}"]

    async def has_agent(self, worker: int, limits: Limits | None = None, *, takes: bool = True) -> None:
        """A worker's agent, which follows worker 0's, or none any more."""

        def hear(where: str, replacement: int, proof: str) -> bool:
            self.heard.setdefault(worker, []).append((where, replacement))
            return takes

        local = replace(self.pod, master_address=HERE, node_rank=worker)
        look = Look(local, Processes(lambda rank: None), Reports(local.report_dir, local.ranks), hear_leader=hear)
        limits = limits or Limits()
        factory = protocols(look, TOKEN, Admission(limits), limits)
        loop = asyncio.get_running_loop()
        self.servers.append(await loop.create_server(factory, f"127.0.0.{10 + worker}", self.port))

    async def has_stranger(self, worker: int, answer: bytes) -> None:
        """Who has a worker's address now answers so and closes the connection; empty: says nothing, and keeps it."""
        seen = self.seen.setdefault(worker, [])

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(await reader.readuntil(b"\r\n\r\n"))
            if answer:
                writer.write(answer)
                writer.close()

        self.servers.append(await asyncio.start_server(serve, f"127.0.0.{10 + worker}", self.port))


@pytest.fixture
async def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Others]:
    found = Others(tmp_path, monkeypatch)
    yield found
    for server in found.servers:
        server.close()


async def test_each_agent_hears_it_once(others: Others) -> None:
    await others.has_agent(1)
    await others.has_agent(2, takes=False)
    await others.has_agent(3)
    await announce(others.pod, ())
    assert others.heard == {worker: [(HERE, 2)] for worker in (1, 2, 3)}


async def test_one_that_starts_later_hears_it_then_and_one_that_is_connected_never(others: Others) -> None:
    await others.has_agent(1)
    await others.has_agent(3)
    task = asyncio.create_task(announce(others.pod, {3}))
    await until(lambda: others.heard)
    await others.has_agent(2)
    await task
    assert others.heard == {1: [(HERE, 2)], 2: [(HERE, 2)]}


async def test_who_has_the_address_of_a_former_pod_gets_no_token_and_keeps_nobody_waiting(
    others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One says nothing for as long as it may, and another agent begins meanwhile."""
    monkeypatch.setattr(module, "_SECONDS", 600.0)
    await others.has_stranger(1, b"\x00" * 999)
    await others.has_stranger(3, b"")
    task = asyncio.create_task(announce(others.pod, ()))
    await until(lambda: others.seen[3] and len(others.seen[1]) > 2)
    await others.has_agent(2)
    await until(lambda: others.heard)
    assert not task.done()
    requests = [request for seen in others.seen.values() for request in seen]
    assert not any(TOKEN_HEADER.encode() in request or TOKEN.encode() in request for request in requests)
    task.cancel()


async def test_who_takes_no_proof_is_asked_seldom_and_who_is_busy_soon(
    others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSE_OF_REFUSED_SECONDS", 600.0)
    await others.has_stranger(1, b"HTTP/1.1 401 Unauthorized\r\n\r\n")
    await others.has_stranger(2, b"HTTP/1.1 404 Not Found\r\n\r\n")
    await others.has_stranger(3, b"HTTP/1.1 429 Too Many Requests\r\n\r\n")
    task = asyncio.create_task(announce(others.pod, ()))
    await until(lambda: len(others.seen[3]) > 5)
    assert (len(others.seen[1]), len(others.seen[2])) == (1, 1)
    task.cancel()


async def test_it_ends_where_somebody_never_answers(others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_IN_ALL", 0.1)
    await others.has_stranger(1, b"")
    await announce(others.pod, {3})


@pytest.mark.parametrize("first", [OSError(), UnicodeError()], ids=["no address", "no name"])
async def test_a_look_up_is_tried_again_and_each_address_that_it_finds(
    others: Others, monkeypatch: pytest.MonkeyPatch, first: Exception
) -> None:
    """Another one has no end meanwhile."""
    looked_up, two = list[str](), host_of(others.pod, 2)

    async def look_up(host: str, port: int) -> list[str]:
        looked_up.append(host)
        if host == two:
            await asyncio.Event().wait()
        if looked_up.count(host) == 1:
            raise first
        return ["127.0.0.99", *await others.look_up(host, port)]

    monkeypatch.setattr(module, "addresses", look_up)
    await others.has_agent(1)
    task = asyncio.create_task(announce(others.pod, {3}))
    await until(lambda: others.heard)
    assert others.heard == {1: [(HERE, 2)]}
    assert looked_up.count(two or "") == 1
    task.cancel()


async def test_who_repeats_a_proof_takes_no_answer_from_who_has_the_token(others: Others) -> None:
    await others.has_agent(1, Limits(requests_per_second=0.001))
    path = leader_path(HERE, 2, others.pod.address_proof(HERE, 2) or "")

    async def ask(headers: dict[str, str]) -> bytes:
        return await exchange("POST", "127.0.0.11", others.port, path, headers, most=99, seconds=60, connect_seconds=60)

    await ask({})
    with pytest.raises(NoAnswer, match="429"):
        await ask({})
    assert await ask({TOKEN_HEADER: TOKEN})


@pytest.mark.parametrize("name", ["job", "my-worker-0-a1", "x-worker-0-a"])
def test_the_names_are_those_that_the_operator_gives(name: str) -> None:
    job, site = a_job(name=name), Site(trainer_image="disttrain/trainer:test", token="t")
    assert job.spec is not None
    hosts = [address(job, job.spec, Role.WORKER, index, 12, site)[0] for index in range(12)]
    pod = PodEnvironment(0, 1, hosts[0], None, Path("/"), 1.0, {})
    assert [host_of(pod, index) for index in range(12)] == hosts


def test_processes_of_one_machine_have_no_names() -> None:
    assert host_of(PodEnvironment(0, 1, HERE, None, Path("/"), 1.0, {}), 1) is None
