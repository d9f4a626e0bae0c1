"""Free ports on loopback, below the range from which the kernel takes ports for outgoing connections.

A server that is killed and started again on the same port would otherwise find, now and then, that a client's
connection took it in between.
"""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 29999


def free_port() -> int:
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
