"""What ranks send each other is read by an unpickler that costs no more than what it reads, and by no other."""

import io
import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from disttrain_trainer.runtime.unpickler import PlainUnpickler
from tests.unit.trainer.limited import outcome
from tools.cluster.paths import REPOSITORY


def read(data: bytes) -> object:
    return PlainUnpickler(io.BytesIO(data)).load()


def assembled(*parts: bytes) -> bytes:
    return b"\x80\x05" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


LARGE = b"\x8a\x05" + (10**11).to_bytes(5, "little")
BOMBS = {
    "a call of bytearray": (
        assembled(text("builtins"), text("bytearray"), b"\x93", LARGE, b"\x85R"),
        "UnpicklingError: a rank has sent an object that needs builtins.bytearray",
    ),
    "a bytearray that is not there": (
        assembled(b"\x96" + struct.pack("<Q", 10**11)),
        "UnpicklingError: a rank has sent an object with a bytearray: objects of other ranks may hold plain data only",
    ),
    "an extension": (
        assembled(b"\x82\x01"),
        "UnpicklingError: a rank has sent an object with an extension: objects of other ranks may hold plain data only",
    ),
    "a far place in the memo": (assembled(b"Nr\xff\xff\xff\x7f"), "returned"),
    "bytes that are not there": (assembled(b"\x8e" + struct.pack("<Q", 10**11)), "EOFError: "),
    "a frame that is not there": (assembled(b"\x95" + struct.pack("<Q", 10**11)), "IndexError: "),
}
"""What a rank sends, and what becomes of it, in a process of little memory."""


@pytest.mark.parametrize("name", BOMBS)
def test_nothing_costs_more_than_itself(name: str) -> None:
    data, message = BOMBS[name]
    assert outcome(read, data).startswith(message)


@pytest.mark.parametrize("protocol", range(3, 6))
def test_plain_data_are_read(protocol: int) -> None:
    value = {"a": [1, 2.5, None, True, "x" * 300, b"y" * 300], "b": ({3, 4}, frozenset((5,)), 2**100, 1j)}
    assert read(pickle.dumps(value, protocol)) == value


FORBIDDEN = [
    "import pickle\npickle.Unpickler",
    "from pickle import Unpickler",
    "from _pickle import loads",
    "from torch import load",
    "from torch.serialization import load",
    "import torch\ntorch.load",
    *(
        f"{form.format(name=name)}"
        for name in (
            "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
            "recv_object_list",
        )
        for form in (
            "import torch.distributed as dist\ndist.{name}",
            "from torch.distributed import {name}",
            "from torch.distributed.distributed_c10d import {name}",
            "from torch.distributed import distributed_c10d as c10d\nc10d.{name}",
        )
    ),
]  # fmt: skip


def test_the_linter_forbids_what_unpickles(tmp_path: Path) -> None:
    """By every way to import it."""
    for number, code in enumerate(FORBIDDEN):
        (tmp_path / f"{number}.py").write_text(f"{code}\n")
    arguments = ["check", "--no-cache", f"--config={REPOSITORY / 'pyproject.toml'}", "--select=TID251"]
    command = [sys.executable, "-m", "ruff", *arguments, "--output-format=json", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {int(Path(one["filename"]).stem) for one in json.loads(done.stdout) if one["code"] == "TID251"}
    assert [code for number, code in enumerate(FORBIDDEN) if number not in found] == []
