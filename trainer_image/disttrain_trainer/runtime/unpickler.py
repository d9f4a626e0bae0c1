"""What torch unpickles on the trainer's behalf when a rank receives an object: plain data and descriptions of tensors.

The trainer's own code sends none (json_collectives.py). torch's pipeline stages do (the shapes that they exchange
before the first batch), and a user's code may. torch.distributed reads all of them with one Unpickler, which
`restrict_unpickling` replaces by one that knows a few names; each other name is refused, so no code can come along.
"""

from __future__ import annotations

import pickle

import torch
from torch.distributed import distributed_c10d

_ALLOWED = {
    "builtins": {"set", "frozenset", "complex", "bytearray"},
    "collections": {"OrderedDict"},
    "torch": {"Size"},
    # torch 2.11 sends shapes as meta tensors, which have no numbers; later versions send descriptions.
    "torch._utils": {"_rebuild_meta_tensor_no_storage"},
    "torch.distributed.pipelining._utils": {
        "_TensorMeta", "_DTensorMeta", "_StageForwardMeta", "_StageBackwardMeta",
    },
}  # fmt: skip


class PlainUnpickler(pickle.Unpickler):
    """Reads plain data and descriptions of tensors."""

    def find_class(self, module: str, name: str) -> object:
        """Return the class or function of this name. Raises UnpicklingError for all but a few."""
        if name in _ALLOWED.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"a rank has sent an object that needs {module}.{name}: objects of other ranks may hold plain data only "
            "(dicts, lists, strings, numbers); send tensors by torch.distributed's other collectives"
        )


def restrict_unpickling() -> None:
    """Have object collectives of this process read nothing else from now on."""
    distributed_c10d._unpickler = PlainUnpickler  # type: ignore[misc]
