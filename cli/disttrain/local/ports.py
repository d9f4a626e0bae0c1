"""Free ports of the loopback interface."""

import socket
from contextlib import ExitStack


def free_ports(count: int) -> list[int]:
    """As many different ports that nobody listens on. Another process may still be faster: a rank then ends with
    PortInUse, and the next attempt gets other ports."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
