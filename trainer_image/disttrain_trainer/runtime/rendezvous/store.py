"""torch's store for a world, which cannot be reached without the token of the attempt."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import sys
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from disttrain_trainer.runtime.rendezvous.forwarder import Forwarder, Place, dial
from disttrain_trainer.runtime.rendezvous.gateway import Gateway

_BACKLOG = 1024
_LOOPBACK = "127.0.0.1"


def open_store(place: Place, timeout: timedelta) -> dist.TCPStore:
    """Return the store of this rank, once all ranks have come (on rank 0).

    Without a key, which only a place on the loopback interface may be, nothing is proved; nor under torchrun, whose
    agent has opened a store there already, of which every rank is a client. Raises OSError (on rank 0 with EADDRINUSE
    where the port belongs to another program), Refused or DistError.
    """
    # gloo then asks for all addresses of a group at once, and not for one after the other: each question goes through
    # the gateway, which is one thread.
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        return dist.TCPStore(place.host, place.port, place.world_size, False, timeout)
    if place.key is None:
        descriptor = _listen(place.host, place.port).detach() if place.rank == 0 else None
        first = place.rank == 0
        host = _LOOPBACK if place.host == "localhost" else place.host.strip("[]")
        return dist.TCPStore(
            host, place.port, place.world_size, first, timeout, master_listen_fd=descriptor, use_libuv=True
        )
    if place.rank == 0:
        inner = socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG)
        port: int = inner.getsockname()[1]
        _allow_descriptors()
        # Lives as long as the process: its thread holds it.
        Gateway(_listen(place.host, place.port), (_LOOPBACK, port), place.key, place.world_size, _log)
        return dist.TCPStore(
            _LOOPBACK, port, place.world_size, True, timeout, master_listen_fd=inner.detach(), use_libuv=True
        )
    seconds = timeout.total_seconds()
    forwarder = Forwarder(place, dial(place, seconds, _log), seconds)
    return dist.TCPStore(_LOOPBACK, forwarder.port, place.world_size, False, timeout)


def _listen(host: str, port: int) -> socket.socket:
    """The address itself where it is one of this machine's; in a pod, whose host is a name, all."""
    if host == "localhost":
        host = _LOOPBACK
    with suppress(ValueError):
        literal = ipaddress.ip_address(host.strip("[]"))
        family = socket.AF_INET6 if literal.version == 6 else socket.AF_INET
        return socket.create_server((str(literal), port), family=family, backlog=_BACKLOG)
    # Where IPv6 is off, its sockets cannot be made, or not bound.
    with suppress(OSError, ValueError):
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def _allow_descriptors() -> None:
    """Each connection takes two here and one in the store; the usual limit is 1024, what may be asked for far more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _log(sentence: str) -> None:
    # The gateway's thread carries the connections of all ranks: a log that cannot be written must not end it.
    with suppress(OSError):
        print(f"disttrain: {sentence}", file=sys.stderr, flush=True)
