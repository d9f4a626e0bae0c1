"""Ports on which the ranks of a command of the user's own meet after a restart in place."""

import itertools
import random
import socket
from collections.abc import Iterator

from disttrain_api.names import RESTARTED_MASTER_PORTS


def free_ports() -> Iterator[int]:
    """Yield ports that nobody listens on here when they are asked for, each as seldom as can be; 0: there is none."""
    ports = itertools.cycle(random.sample(RESTARTED_MASTER_PORTS, len(RESTARTED_MASTER_PORTS)))
    while True:
        yield next(filter(_is_free, itertools.islice(ports, len(RESTARTED_MASTER_PORTS))), 0)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
