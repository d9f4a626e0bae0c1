"""Free ports on loopback, below the range from which the kernel takes ports for outgoing connections.

A server that is killed and started again on the same port would otherwise find, now and then, that a client's
connection took it in between.
"""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 29999
_given: set[int] = set()
"""A port is free until who asked for it listens."""


def free_port() -> int:
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.add(port)
                return port
