"""The API for training scripts: `report` (one line) and `session` (a whole loop).

Both load on first use. `disttrain` exports the same two names; an image without the command line has them here.
"""

from importlib import import_module
from typing import Any

__all__ = ["report", "session"]

_MODULES = {"report": "disttrain_session.reporting", "session": "disttrain_session.session"}
"""Module of each name. Only `session` needs torch, whose import takes seconds."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(_MODULES[name]), name)
    # The import has set the submodule `session` as an attribute of this package: the name means what it holds.
    globals()[name] = found
    return found
