"""Free ports on loopback, below the range from which the kernel takes ports for outgoing connections.

A server that is killed and started again on the same port would otherwise find, now and then, that a client's
connection took it in between.
"""

from __future__ import annotations

import random
import socket
from collections import deque

_FIRST, _LAST = 20000, 29999
_given: deque[int] = deque(maxlen=1000)
"""The latest ones: a port is free until who asked for it listens."""


def free_port() -> int:
    while True:
        port = random.SystemRandom().randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            if port not in _given:
                _given.append(port)
                return port
