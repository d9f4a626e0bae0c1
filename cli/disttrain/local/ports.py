"""Free ports of the loopback interface."""

import random
import socket
from contextlib import ExitStack

from disttrain.errors import CommandError

_CANDIDATES = range(20_000, 30_000)
"""Below what kernels give to outgoing connections (Linux from 32768, macOS from 49152): until a rank listens on its
port, seconds later, any connection of this machine could be given it."""


def free_ports(count: int) -> list[int]:
    """Return that many different free ports. Another process may still take one first: a rank then ends with PortInUse,
    and the next attempt gets other ports. Raises CommandError if there are too few."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.sample(_CANDIDATES, len(_CANDIDATES)):
            probe = socket.socket()
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                probe.close()
            else:
                held.enter_context(probe)
                found.append(port)
            if len(found) == count:
                return found
    first, last = _CANDIDATES[0], _CANDIDATES[-1]
    raise CommandError(f"free ports of 127.0.0.1 from {first} to {last}: {len(found)}, the job needs {count}")
