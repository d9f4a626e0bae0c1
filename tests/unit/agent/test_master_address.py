"""Where the first ranks of a pod meet when its agent hears where worker 0 is, before the name has an address."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from disttrain_agent import listen
from disttrain_agent.environment import PodEnvironment
from disttrain_agent.listen import open_port
from disttrain_agent.reports import TerminationMessage
from disttrain_agent.supervise import Supervisor
from disttrain_api.agent_api import STATUS
from disttrain_api.leader_address import address_proof, leader_path
from disttrain_api.names import TOKEN_FILE, TOKEN_HEADER
from disttrain_operator.agent_http import NoAnswer, exchange
from tests.unit.agent.test_http_api import JOB_TOKEN, TOKEN, a_port
from tests.waiting import GENEROUS

WORKER_0 = "10.0.0.7"
PROOF = address_proof(JOB_TOKEN, "uid-1", 3, WORKER_0, 0)
RANK = "import os; open('{}', 'w').write(os.environ['MASTER_ADDR'])"


class Waiting:
    """A pod whose agent waits for the address of worker 0."""

    def __init__(self, folder: Path, node_rank: int) -> None:
        config = folder / "job.json"
        config.write_text("{}")
        config.with_name(TOKEN_FILE).write_text(JOB_TOKEN)
        self.port, self.met = a_port(), folder / "met"
        pod = PodEnvironment(
            node_rank, 1, "no-such-host.invalid", config, folder, 1.0, {}, job_uid="uid-1", attempt=3, workers=2,
            agent_port=self.port,
        )  # fmt: skip
        rank = [sys.executable, "-c", RANK.format(self.met)]
        self.run = asyncio.create_task(Supervisor(pod, rank, TerminationMessage(folder / "message")).run())

    async def ask(self, method: str, path: str, token: str = TOKEN) -> bytes:
        return await exchange(
            method, "127.0.0.1", self.port, path, {TOKEN_HEADER: token}, most=9999, seconds=60.0, connect_seconds=60.0
        )

    async def answers(self) -> bool:
        try:
            await self.ask("GET", "/healthz")
        except OSError:
            return False
        return True

    async def tell(self, address: str, proof: str, replacement: int = 0, token: str = TOKEN) -> bool:
        """Whether the agent takes the address."""
        path = leader_path(address, replacement, proof)
        try:
            return bool(json.loads(await self.ask("POST", path, token))["known"])
        except NoAnswer as error:
            return str(error) not in ("it answers 400", "it answers 401", "it answers 409")


@pytest.fixture(params=[0, 1], ids=["worker 0", "worker 1"])
async def waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> AsyncIterator[Waiting]:
    monkeypatch.setattr(listen, "open_port", lambda port, *, loopback: open_port(port, loopback=True))
    pod = Waiting(tmp_path, request.param)
    for _ in range(int(100 * GENEROUS)):
        if await pod.answers():
            break
        await asyncio.sleep(0.01)
    yield pod
    pod.run.cancel()
    await asyncio.wait([pod.run])


async def test_ranks_start_with_the_address_that_is_proved(waiting: Waiting) -> None:
    assert await waiting.tell(WORKER_0, PROOF)
    assert await waiting.run == 0
    assert waiting.met.read_text() == WORKER_0


async def test_a_proof_stands_for_the_token(waiting: Waiting) -> None:
    for proof in ("", PROOF[:-1], address_proof(JOB_TOKEN, "uid-1", 2, WORKER_0, 0)):
        with pytest.raises(NoAnswer, match="401"):
            await waiting.ask("POST", leader_path(WORKER_0, 0, proof), "")
    with pytest.raises(NoAnswer, match="401"):
        await waiting.ask("GET", f"{STATUS.path}?address={WORKER_0}&replacement=0&proof={PROOF}", "")
    assert await waiting.tell(WORKER_0, PROOF, token="")
    assert await waiting.run == 0
    assert waiting.met.read_text() == WORKER_0


async def test_one_that_is_not_proved_for_this_attempt_starts_nothing(waiting: Waiting) -> None:
    """Whoever reads the requests knows the token of the agents, and former proofs."""
    for proof in ("", "%C3%A9", PROOF[:-1], address_proof(JOB_TOKEN, "uid-1", 2, WORKER_0, 0),
                  address_proof(TOKEN, "uid-1", 3, WORKER_0, 0)):  # fmt: skip
        assert not await waiting.tell(WORKER_0, proof), proof
    assert not await waiting.tell("10.0.0.8", PROOF)
    assert not await waiting.tell("127.0.0.1", address_proof(JOB_TOKEN, "uid-1", 3, "127.0.0.1", 0)), "it is this pod"
    with pytest.raises(NoAnswer, match="503"):
        await waiting.ask("GET", STATUS.path)
    assert not waiting.met.exists()


async def test_a_pod_that_comes_while_worker_0s_was_replaced_starts_there(waiting: Waiting) -> None:
    assert not await waiting.tell(WORKER_0, PROOF, replacement=4), "its number is proved, too"
    assert await waiting.tell(WORKER_0, address_proof(JOB_TOKEN, "uid-1", 3, WORKER_0, 4), replacement=4)
    assert await waiting.run == 0
    assert waiting.met.read_text() == WORKER_0
