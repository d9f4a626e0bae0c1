"""The pod in place of a lost one of worker 0 says to the agents of the others where it is.

The operator says it as well, as soon as it sees the pod's address: up to a second later, or not while it is away. The
others' names have addresses, as their pods run; a name server may remember worker 0's former one.
"""

import asyncio
from collections.abc import Container

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.channel import end
from disttrain_agent.resolve import addresses, own_address
from disttrain_api.leader_address import leader_path

_AT_A_TIME = 32
_ROUNDS = 60
_PAUSE_SECONDS = 1.0
"""Between two rounds over those that have not answered: their agents may be starting as well."""
_SECONDS = 3.0
"""For one agent, without the look-up of its name."""
_ANSWERS = (b"HTTP/1.1 200", b"HTTP/1.1 409")
"""It knows, or does not want to."""
_WORKER_0 = "-worker-0-a"


async def announce(pod: PodEnvironment, connected: Container[int]) -> None:
    """Say to each other worker's agent where this pod is, until it has answered or is `connected`.

    No token is sent: a name may still lead to the address of a pod that is lost, where another job's may be now.
    """
    places, missing = asyncio.Semaphore(_AT_A_TIME), set(range(1, pod.workers))

    async def say(worker: int, number: int) -> None:
        async with places:
            if worker in connected or await _says(pod, worker, number):
                missing.discard(worker)

    for number in range(_ROUNDS):
        await asyncio.gather(*(say(worker, number) for worker in sorted(missing)))
        if not missing:
            return
        await asyncio.sleep(_PAUSE_SECONDS)


def host_of(pod: PodEnvironment, worker: int) -> str | None:
    """Return the name of another worker's pod; None where the pods have none, such as processes of one machine."""
    name, dot, service = pod.master_address.partition(".")
    # A job may be called like a pod.
    job, found, attempt = name.rpartition(_WORKER_0)
    return f"{job}{_WORKER_0.replace('0', str(worker))}{attempt}{dot}{service}" if found else None


async def _says(pod: PodEnvironment, worker: int, number: int) -> bool:
    """Return whether the agent of a worker has answered. number: how often it was asked before."""
    host, port = host_of(pod, worker), pod.agent_port
    if host is None or port is None:
        return True
    try:
        found = await addresses(host, port)
        return await asyncio.wait_for(_ask(pod, found[number % len(found)], port), _SECONDS)
    except (OSError, asyncio.IncompleteReadError):
        return False


async def _ask(pod: PodEnvironment, host: str, port: int) -> bool:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        own = own_address(writer)
        proof = pod.address_proof(own, pod.replacement)
        if proof is None:
            return True
        path = leader_path(own, pod.replacement, proof)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: agent\r\nContent-Length: 0\r\n\r\n".encode())
        return await reader.readexactly(len(_ANSWERS[0])) in _ANSWERS
    finally:
        await end(writer)
