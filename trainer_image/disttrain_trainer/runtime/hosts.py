"""Which interfaces a rank listens on."""

import ipaddress
import os
import socket
from contextlib import suppress


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's own loopback interface, as in a local run."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False


def stay_on_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface alone, unless the environment names another one."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in names:
            os.environ.setdefault(variable, name)
