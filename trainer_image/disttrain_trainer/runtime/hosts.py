"""Which interfaces a rank listens on."""

import os
import socket


def stay_on_loopback() -> None:
    """Have gloo and NCCL listen on the loopback interface alone, unless the environment names another one."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        for name in names:
            os.environ.setdefault(variable, name)
