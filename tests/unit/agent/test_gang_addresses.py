"""Where an agent looks for worker 0's agent when somebody tells it the address, and whom it believes."""

import asyncio
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain_agent.gang.channel import HELLO_BYTES
from disttrain_agent.gang.follow import FollowingAgent
from disttrain_agent.gang.leader import Leader
from disttrain_agent.restart import Limits
from disttrain_api.agent_api import LEADER
from disttrain_api.leader_address import address_proof
from disttrain_api.names import Env
from tests.unit.agent.test_http_api import JOB_TOKEN, TOKEN, a_port, ask

from .conftest import Pod
from .test_gang_agents import Gangs, gangs_of, start
from .test_gang_decisions import killed
from .test_gang_strangers import KEY, WORKERS, Port, until

NOBODY = "127.0.0.9"


class Names:
    """A name server that a test breaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses = [NOBODY]
        self.answers = asyncio.Event()
        self.asked = 0
        monkeypatch.setattr("disttrain_agent.gang.follow.addresses", self.look_up)
        monkeypatch.setattr("disttrain_agent.gang.follow._AGAIN_SECONDS", 0.01)

    async def look_up(self, host: str, number: int) -> list[str]:
        self.asked += 1
        await self.answers.wait()
        return self.addresses


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


def a_leader(replacement: int = 2) -> Port:
    return Port(Leader(WORKERS, Limits(3, 0), 1.0, 60.0, 900.0, replacement=replacement))


def a_follower(port: int, log: list[str] | None = None, worker: int = 1) -> FollowingAgent:
    log = [] if log is None else log
    return FollowingAgent(lambda: None, log.append, KEY, worker, WORKERS, "worker-0", port, longest=60.0)


async def test_an_agent_goes_where_it_is_told_while_the_name_server_is_silent(names: Names) -> None:
    port, log = a_leader(), list[str]()
    follower = a_follower(port.address[1], log)
    await until(lambda: names.asked)
    assert follower.hear_leader("127.0.0.1", 2)
    await until(lambda: 1 in port.leader._present)
    assert log == ["gang: another pod of worker 0 is at 127.0.0.1"]
    follower.close()
    port.close()


async def test_the_first_connection_goes_where_the_ranks_meet_before_the_name_has_an_address(names: Names) -> None:
    port = a_leader(0)
    follower = FollowingAgent(
        lambda: None, list[str]().append, KEY, 1, WORKERS, "worker-0", port.address[1], heard="127.0.0.1"
    )
    await until(lambda: 1 in port.leader._present)
    assert not names.asked
    port.close()
    await until(lambda: names.asked)
    follower.close()


async def test_the_ranks_meet_at_the_address_that_the_agent_has_heard(names: Names) -> None:
    names.answers.set()
    port = a_leader()
    followers = [a_follower(port.address[1], worker=worker) for worker in (1, 2)]
    assert all(follower.hear_leader("127.0.0.1", 2) for follower in followers)
    await until(lambda: port.leader._present == {0, 1, 2})
    for follower in followers:
        follower.ended(killed(), 0.0)
    await until(lambda: len(port.leader._ended) == WORKERS)
    port.agent.tick()
    await until(lambda: [follower.generation for follower in followers] == [1, 1])
    assert {follower.master_address for follower in followers} == {"127.0.0.1"}
    for number in (1, 2):
        assert not followers[0].hear_leader("127.0.0.3", number), "it follows that one or a newer one"
    assert followers[0].hear_leader("127.0.0.3", 3)
    for follower in followers:
        follower.close()
    port.close()


async def test_a_lie_costs_some_tries_and_no_connection(names: Names) -> None:
    """Red where the name is not looked up any more. Who was at the address has learned no more than a hello."""
    names.answers.set()
    seen = list[bytes]()

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readexactly(HELLO_BYTES))
        writer.write(b"n" * 32 + b"c" * 32)
        writer.close()

    port, log = a_leader(), list[str]()
    server = await asyncio.start_server(impostor, "127.0.0.3", port.address[1])
    follower = a_follower(port.address[1], log)
    assert follower.hear_leader("127.0.0.3", 9)
    await until(lambda: seen)
    names.addresses = ["127.0.0.1"]
    await until(lambda: 1 in port.leader._present)
    channel = port.agent._channels[1]
    follower._hurried_at, lines = -math.inf, len(log)
    assert follower.hear_leader("127.0.0.3", 10)
    assert len(log) == lines, "nothing is tried: it keeps the connection that it has"
    assert port.agent._channels[1] is channel
    follower.close()
    server.close()
    port.close()


async def test_who_tells_one_address_after_another_keeps_no_agent_from_looking_the_name_up(names: Names) -> None:
    names.answers.set()
    port, log = a_leader(), list[str]()
    follower = a_follower(port.address[1], log)
    lies = itertools.cycle([NOBODY, "127.0.0.8"])
    for number in range(1, 300):
        assert follower.hear_leader(next(lies), number)
        await asyncio.sleep(0)
    names.addresses = ["127.0.0.1"]

    def hears_again() -> bool:
        follower.hear_leader(next(lies), 1000)
        return 1 in port.leader._present

    await until(hears_again)
    assert len(log) == 1, "nor does it fill the log"
    follower.close()
    port.close()


async def test_an_older_address_takes_no_place_of_a_newer_one(names: Names) -> None:
    """A pod that was behind a partition says where it is as well."""
    follower = a_follower(1)
    assert follower.hear_leader("127.0.0.3", 3)
    assert not follower.hear_leader(NOBODY, 2)
    assert follower._heard_of == "127.0.0.3"
    follower.close()


async def test_an_address_is_forgotten_when_the_name_leads_there(names: Names) -> None:
    names.answers.set()
    names.addresses = ["127.0.0.1", NOBODY]
    port = a_leader()
    follower = a_follower(port.address[1])
    assert follower.hear_leader(NOBODY, 2)
    await until(lambda: 1 in port.leader._present)
    assert follower._heard_of is None
    follower.close()
    port.close()


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[Gangs]:
    yield from gangs_of(Pod, tmp_path)


def test_an_agent_takes_the_address_of_a_pod_and_nothing_else(gangs: Gangs) -> None:
    """These pods are processes of one machine, whose addresses are its own."""
    first, second = pods = gangs(2, token=JOB_TOKEN)
    for pod in pods:
        pod.changes[Env.AGENT_PORT] = str(a_port())
    start(pods, "ready(), wait('go')")

    def tell(pod: Pod, query: str, **options: str) -> int:
        code, _ = ask(pod, f"{LEADER.path}{query}", **{"method": "POST", **options})
        return code

    def proof(number: int) -> str:
        return address_proof(JOB_TOKEN, "uid-1", 0, "127.0.0.1", number)

    known = f"?address=127.0.0.1&replacement=1&proof={proof(1)}"
    assert tell(second, known) == 200
    assert tell(second, known.replace("replacement=1", "replacement=9")) == 409, "its number is proved, too"
    assert tell(first, known) == 409, "worker 0's agent follows nobody"
    assert tell(second, known, method="GET") == 405
    assert tell(second, "?address=127.0.0.1&replacement=1", token=TOKEN[:-1]) == 401
    addresses = [
        "",
        "localhost",
        "10.0.0.7",
        "127.0.0.1:80",
        "127.1",
        "0177.0.0.1",
        "::ffff:127.0.0.1",
        "%00",
        "1" * 900,
    ]
    for address in addresses:
        assert tell(second, f"?address={address}&replacement=1") == 400, address
    assert tell(second, f"?address=127.0.0.1&replacement=0&proof={proof(0)}") == 409, "its ranks have started"
    for number in ("", "-1", "1.5", "x", "9" * 11):
        assert tell(second, f"?address=127.0.0.1&replacement={number}") == 400, number
    for query in ("", "?address=127.0.0.1", "?replacement=1"):
        assert tell(second, query) == 400
    assert "Traceback" not in second.log
    for pod in pods:
        (pod.folder / "go").touch()
    assert [pod.wait() for pod in pods] == [0, 0], first.log + second.log
