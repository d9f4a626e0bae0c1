"""Addresses of the pods of a job: waiting until the master's name has one, and those of connections."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable

# The name appears when worker 0 has an address; it may have been looked up before, and cluster DNS remembers for up to
# 30 s that it was missing. While worker 0 does not start, the others keep their nodes for so long; when they give up,
# the gang restarts, uncounted. Once it has started, it finds out itself that its name is missing (below), and
# the operator ends all of them with it.
LIMIT_SECONDS = 3600.0
# The name of the pod that waits: it has an address since before its containers started, so nobody else is waited for.
# To the operator the pod runs, and no start deadline ends this wait.
OWN_NAME_SECONDS = 300.0
_RETRY_SECONDS = 1.0
_LOG_EVERY_SECONDS = 30.0

Lookup = Callable[[str], object]


def look_up(host: str) -> object:
    """Raises OSError where the name has no address."""
    return socket.getaddrinfo(host, None)


async def wait_for_address(
    host: str, log: Callable[[str], None], *, lookup: Lookup = look_up, limit: float = LIMIT_SECONDS
) -> bool:
    """True as soon as `host` has an address, False when it still has none after `limit` seconds."""
    loop = asyncio.get_running_loop()
    began, logged = loop.time(), None
    while True:
        error = await _try(host, lookup)
        waited = loop.time() - began
        if error is None:
            if logged is not None:
                log(f"{host} has an address after {waited:.0f} s")
            return True
        if waited >= limit:
            log(f"{host} has no address after {waited:.0f} s ({error}): giving up")
            return False
        if logged is None or waited - logged >= _LOG_EVERY_SECONDS:
            log(f"waiting for the address of {host} ({error})")
            logged = waited
        await asyncio.sleep(_RETRY_SECONDS)


async def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, in the order in which to try them. Raises OSError where it has none."""
    found: list[str] = []

    def lookup(name: str) -> None:
        found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))

    error = await _try(host, lookup)
    if error is not None or not found:
        raise OSError(f"{host} has no address")
    return found


def own_address(writer: asyncio.StreamWriter) -> str:
    """Return the address of this side of a connection; of one over IPv4 that a socket for IPv6 has taken, IPv4's."""
    address = ipaddress.ip_address(str(writer.get_extra_info("sockname")[0]).partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


async def _try(host: str, lookup: Lookup) -> Exception | None:
    """Do one look-up in a thread that is never joined, because a look-up of the C library cannot be interrupted."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Exception | None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not answer.done():
            answer.set_result(error)

    def work() -> None:
        error: Exception | None = None
        try:
            lookup(host)
        except (OSError, ValueError) as found:  # ValueError: not a name at all
            error = found
        try:
            loop.call_soon_threadsafe(settle, error)
        except RuntimeError:
            return  # the agent was asked to stop and its loop has ended

    threading.Thread(target=work, daemon=True).start()
    return await answer
