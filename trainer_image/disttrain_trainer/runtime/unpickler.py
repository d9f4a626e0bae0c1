"""The unpickler of objects that torch receives from other ranks: plain data and descriptions of tensors.

The trainer's own code sends none (json_collectives.py). torch's pipeline stages do (the shapes that they exchange
before the first batch), and a user's code may. torch.distributed reads all of them with one Unpickler, which
`restrict_unpickling` replaces by one that knows a few names; each other name is refused, so no code can come along.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d

_ALLOWED = {
    "builtins": {"set", "frozenset", "complex"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    # torch 2.11 sends shapes as meta tensors, which have no numbers; later versions send descriptions.
    "torch._utils": {"_rebuild_meta_tensor_no_storage"},
    "torch.distributed.pipelining._utils": {
        "_TensorMeta", "_DTensorMeta", "_StageForwardMeta", "_StageBackwardMeta",
    },
}  # fmt: skip


_ADVICE = (
    "objects of other ranks may hold plain data only (dicts, lists, strings, numbers); send tensors by "
    "torch.distributed's other collectives"
)


def _refuse(what: str) -> Callable[[Any], None]:
    def refused(_: object) -> None:
        raise pickle.UnpicklingError(f"a rank has sent an object with {what}: {_ADVICE}")

    return refused


# Written in Python: the one written in C makes room for as many entries of its memo, and as many bytes, as the pickle
# says that there are, before it looks whether they come.
class PlainUnpickler(pickle._Unpickler):  # noqa: TID251 - restricted here
    """Reads plain data and descriptions of tensors. Takes memory in proportion to what it reads."""

    dispatch = {
        **pickle._Unpickler.dispatch,  # noqa: TID251
        **dict.fromkeys(pickle.BYTEARRAY8, _refuse("a bytearray")),
        **dict.fromkeys(pickle.EXT1 + pickle.EXT2 + pickle.EXT4, _refuse("an extension")),
    }

    def find_class(self, module: str, name: str) -> object:
        """Return the class or function of this name. Raises UnpicklingError for all but a few."""
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a rank has sent an object that needs {module[:100]}.{name[:100]}: {_ADVICE}")


def restrict_unpickling() -> None:
    """Have object collectives of this process read nothing else from now on."""
    distributed_c10d._unpickler = PlainUnpickler  # type: ignore[misc, assignment]
