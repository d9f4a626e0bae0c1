"""Free ports on loopback, which no other process that asks here is given, however many runs of tests there are.

They lie below the range from which the kernel takes ports for outgoing connections: a server that is killed and started
again on the same port would otherwise find, now and then, that a client's connection took it in between. And beside
those of `disttrain run`, which may run at the same time.
"""

from __future__ import annotations

import random
import socket
from functools import cache

_BLOCKS = [range(first, first + 200) for first in range(12_000, 20_000, 200)]
_given: dict[int, None] = {}
"""The latest one last. A port is free until who asked for it listens: it is given again after all others."""


def free_port() -> int:
    """Raises RuntimeError where there is none."""
    _, block = _own_block()
    fresh = [port for port in random.SystemRandom().sample(block[1:], len(block) - 1) if port not in _given]
    for port in (*fresh, *_given):
        if (probe := _bound(port)) is not None:
            probe.close()
            _given.pop(port, None)
            _given[port] = None
            return port
    raise RuntimeError(f"no port of {block[0]} to {block[-1]} on 127.0.0.1 is free")


@cache
def _own_block() -> tuple[socket.socket, range]:
    """Ports of this process, which holds the first one as long as it lives."""
    for block in random.SystemRandom().sample(_BLOCKS, len(_BLOCKS)):
        if (claim := _bound(block[0])) is not None:
            return claim, block
    raise RuntimeError(f"{len(_BLOCKS)} processes have taken all ports from {_BLOCKS[0][0]} to {_BLOCKS[-1][-1]}")


def _bound(port: int) -> socket.socket | None:
    found = socket.socket()
    try:
        found.bind(("127.0.0.1", port))
    except OSError:
        found.close()
        return None
    return found
