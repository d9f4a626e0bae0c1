"""State of objects that are not ours: what comes back of it, and what a stranger's bytes may cost."""

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from disttrain_trainer.runtime.plain import from_bytes, load_plain, to_bytes

REFUSED = "it holds something else than plain values and tensors; nothing of it was run"


def archive(pickled: bytes, *, compression: int = zipfile.ZIP_STORED) -> bytes:
    """A file as torch.save writes it, with this pickle in it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as written:
        for name, content in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n")):
            written.writestr(f"archive/{name}", content)
    return file.getvalue()


def array_of(module: str, count: int) -> bytes:
    """The pickle of `bytearray(count)`: some thirty bytes, whatever the count."""
    return f"\x80\x02c{module}\nbytearray\n".encode("latin1") + b"J" + struct.pack("<i", count) + b"\x85R."


def as_before_zip(state: Any, change: Callable[[bytes], bytes] = bytes) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, _use_new_zipfile_serialization=False)
    return change(file.getvalue())


COSTLY = {
    "an array of zeros": archive(array_of("builtins", 2**31 - 1)),
    "an array of zeros by its old name": archive(array_of("__builtin__", 2**31 - 1)),
    "an array of zeros amid a list": archive(b"\x80\x02]" + array_of("builtins", 2**31 - 1)[2:-1] + b"a."),
    "a long text, compressed": archive(pickle.dumps("x" * 2**24, 2), compression=zipfile.ZIP_DEFLATED),
    "a storage as before archives": as_before_zip(
        torch.arange(4.0), lambda written: written.replace(b"K\x04N", b"J" + struct.pack("<i", 2**31 - 1) + b"N")
    ),
    "no archive": pickle.dumps({"a": 1}, 2),
    "an archive without a pickle": archive(b"")[:-1],
    "the end of a pickle alone": archive(b"\x80\x02"),
    "no instruction": archive(b"\xff"),
    "nothing": b"",
}


_NO_ARCHIVE = "no archive of torch.save: File is not a zip file"
SAYS = {
    "an array of zeros": "GLOBAL builtins.bytearray",
    "an array of zeros by its old name": "GLOBAL __builtin__.bytearray",
    "an array of zeros amid a list": "GLOBAL builtins.bytearray",
    "a long text, compressed": "an archive that is larger than its file",
    "a storage as before archives": _NO_ARCHIVE,
    "no archive": _NO_ARCHIVE,
    "an archive without a pickle": _NO_ARCHIVE,
    "the end of a pickle alone": "pickle exhausted before seeing STOP",
    "no instruction": "opcode .* unknown",
    "nothing": _NO_ARCHIVE,
}
"""For which reason each is refused, and no other."""


@pytest.mark.parametrize("name", COSTLY)
def test_bytes_that_would_cost_more_than_they_are_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch sees them. Red where an array, a compressed member or another format is let in."""
    written = COSTLY[name]
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(ValueError, match=REFUSED):
        from_bytes(torch.from_numpy(np.frombuffer(bytearray(written), dtype=np.uint8)))
    with pytest.raises(pickle.UnpicklingError, match=SAYS[name]):
        load_plain(io.BytesIO(written))


@pytest.mark.parametrize(
    "state",
    [
        None,
        {"a": [1, 2.5, True, None, "text", b"\x00\xff" * 1000], ("b", 1): OrderedDict(c=1j)},
        {"bytearray": "bytearray", "builtins bytearray": b"cbuiltins\nbytearray\n"},
        "x" * 100_000,
        list(range(10_000)),
    ],
    ids=["none", "values", "names", "a long text", "many"],
)
def test_plain_values_come_back(state: Any) -> None:
    assert from_bytes(to_bytes(state)) == state


def test_tensors_come_back() -> None:
    state: dict[str, Tensor] = {
        "scalar": torch.tensor(3),
        "view": torch.arange(10.0)[::2],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "weight": torch.nn.Parameter(torch.ones(2)),
    }
    found = from_bytes(to_bytes(state))
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
