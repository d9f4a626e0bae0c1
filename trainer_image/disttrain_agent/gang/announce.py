"""The pod in place of a lost one of worker 0 says to the agents of the others where it is.

The operator says it as well, as soon as it sees the pod's address: up to a second later, or not while it is away. The
others' names have addresses, as their pods run; a name server may remember worker 0's former one. The name of a pod
that was lost with worker 0's has none for a while: its agent looks for worker 0 by itself when it starts.
"""

import asyncio
import contextlib
from collections.abc import Container
from itertools import count

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.channel import end
from disttrain_agent.resolve import addresses, own_address
from disttrain_api.leader_address import leader_path

_AT_A_TIME = 32
_SECONDS_IN_ALL = 60.0
_PAUSE_SECONDS = 1.0
"""Before an agent is asked again that has not answered: it may be starting as well."""
_PAUSE_OF_REFUSED_SECONDS = 10.0
"""The same for one that takes no proof: of an earlier version, or of another job where a name still leads to the
address of a lost pod."""
_SECONDS = 3.0
"""For one agent, without the look-up of its name: that is a thread, which nothing ends before its time."""
_ANSWERS = (b"HTTP/1.1 200", b"HTTP/1.1 409")
"""It knows, or does not want to."""
_REFUSED = (b"HTTP/1.1 401", b"HTTP/1.1 404")
"""The operator asks no more after these. Here the name may lead to the right agent a little later."""
_WORKER_0 = "-worker-0-a"


async def announce(pod: PodEnvironment, connected: Container[int]) -> None:
    """Say to each other worker's agent where this pod is, until it has answered or is `connected`.

    No token is sent: a name may still lead to the address of a pod that is lost, where another job's may be now.
    """
    places = asyncio.Semaphore(_AT_A_TIME)

    async def say(worker: int) -> None:
        for number in count():
            async with places:
                pause = None if worker in connected else await _says(pod, worker, number)
            if pause is None:
                return
            await asyncio.sleep(pause)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS_IN_ALL):
            await asyncio.gather(*(say(worker) for worker in range(1, pod.workers)))


def host_of(pod: PodEnvironment, worker: int) -> str | None:
    """Return the name of another worker's pod; None where the pods have none, such as processes of one machine."""
    name, dot, service = pod.master_address.partition(".")
    # A job may be called like a pod.
    job, found, attempt = name.rpartition(_WORKER_0)
    return f"{job}{_WORKER_0.replace('0', str(worker))}{attempt}{dot}{service}" if found else None


async def _says(pod: PodEnvironment, worker: int, number: int) -> float | None:
    """Return after how many seconds the agent of a worker is asked again; None where it has answered. number: how often
    it was asked before."""
    host, port = host_of(pod, worker), pod.agent_port
    if host is None or port is None:
        return None
    try:
        found = await addresses(host, port)
        async with asyncio.timeout(_SECONDS):
            answer = await _ask(pod, found[number % len(found)], port)
    except Exception:  # whatever is wrong with one name or answer, the others hear
        return _PAUSE_SECONDS
    if answer is None or answer in _ANSWERS:
        return None
    return _PAUSE_OF_REFUSED_SECONDS if answer in _REFUSED else _PAUSE_SECONDS


async def _ask(pod: PodEnvironment, host: str, port: int) -> bytes | None:
    """Return how the answer of an agent begins; None where this pod has no token to prove its address with."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        own = own_address(writer)
        proof = pod.address_proof(own, pod.replacement)
        if proof is None:
            return None
        path = leader_path(own, pod.replacement, proof)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: agent\r\nContent-Length: 0\r\n\r\n".encode())
        return await reader.readexactly(len(_ANSWERS[0]))
    finally:
        await end(writer)
