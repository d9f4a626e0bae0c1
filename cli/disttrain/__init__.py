"""Train PyTorch models on this machine or a cluster: the command, and the Python client."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from disttrain.async_client import AsyncClient
    from disttrain.client import Client
    from disttrain.cluster.remote import RemoteJob
    from disttrain.errors import CommandError
    from disttrain.function import train
    from disttrain.local_client import LocalClient
    from disttrain_session import report, session

# A line for each name: the module that it is taken from when it is first used.
_MODULES = {
    "AsyncClient": "disttrain.async_client",
    "Client": "disttrain.client",
    "CommandError": "disttrain.errors",
    "LocalClient": "disttrain.local_client",
    "RemoteJob": "disttrain.cluster.remote",
    "report": "disttrain_session",
    "session": "disttrain_session",
    "train": "disttrain.function",
}

__all__ = ["AsyncClient", "Client", "CommandError", "LocalClient", "RemoteJob", "report", "session", "train"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
