"""Messages between workers and servers as frames: [code and length, header, …, tensor, …, tensor, …].

The header is JSON: what the message is, its fields, number format and length of each tensor. The code is the
HMAC-SHA256 (RFC 2104) of the header under a key made of the job's token. A key belongs to one attempt, so that pods of
an older one are not listened to; and to one server, so that an address which for a while leads to another one, after
pods have been made again, leads to nobody. Tensors follow as they lie in memory; the connection authenticates them
(sockets.py). No frame is longer than FRAME_BYTES, so that a connection that has proved nothing can fill no memory:
header and tensors are cut. Nothing that comes from the wire is unpickled.
"""

import hmac
import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from disttrain_api.attempt_key import attempt_key

FORMATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
Frame = bytes | bytearray | memoryview

Sender = tuple[bytes, bytes]
"""Who asks, and the number of the request, both as the transport has them."""

_NAMES = {number_format: name for name, number_format in FORMATS.items()}
_CODE_BYTES = 32
_MAX_HEADER_BYTES = 16 * 2**20
_LENGTH = struct.Struct(">I")
FRAME_BYTES = 2**18
"""Bytes of the longest frame. Encrypted in pieces of this size a message costs least: they fit a processor's cache."""


class Malformed(Exception):  # noqa: N818 - said of a message, not raised to a user
    """Frames that are no message of this job; the text says why."""


@dataclass(frozen=True)
class Message:
    """A message: its `kind`, its fields (JSON values) and one-dimensional CPU tensors."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()

    def number(self, name: str) -> int:
        """A field that is a whole number of at least 0. Raises Malformed."""
        value = self.fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise Malformed(f"`{name}` of {self.kind} is {value!r:.40}, expected a whole number of at least 0")
        return value

    def real(self, name: str) -> float:
        """A field that is a number, inf and nan included. Raises Malformed."""
        value = self.fields.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise Malformed(f"`{name}` of {self.kind} is {value!r:.40}, expected a number")
        return float(value)

    def numbers(self, name: str) -> list[int]:
        """A field that is a list of whole numbers of at least 0. Raises Malformed."""
        values = self.fields.get(name)
        if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
            raise Malformed(f"`{name}` of {self.kind} is {values!r:.40}, expected a list of whole numbers")
        return values


Answers = list[tuple[Sender, Message]]


def worker_of(message: Message, workers: int) -> int:
    """Return the sender. Raises Malformed if the job has no such worker."""
    worker = message.number("worker")
    if worker >= workers:
        raise Malformed(f"worker {worker} of {workers}")
    return worker


def two_numbers(values: list[int]) -> tuple[int, int]:
    """A step and a part. Raises Malformed."""
    if len(values) != 2:
        raise Malformed(f"{len(values)} numbers, expected a step and a part")
    return values[0], values[1]


def key_of(token: str, uid: str, attempt: int) -> bytes:
    """The key from which one attempt of a job makes those of its servers."""
    return attempt_key(token, "parameter server", uid, attempt)


def key_with(server: int, key: bytes) -> bytes:
    """The key under which workers and one server, by its index, authenticate their messages to each other."""
    return hmac.digest(key, b"server %d" % server, "sha256")


def encode(message: Message, key: bytes) -> list[Frame]:
    """The frames of a message. Tensors are not copied: they must stay as they are until the frames are sent."""
    header = json.dumps(
        {
            "kind": message.kind,
            "fields": dict(message.fields),
            "tensors": [[_NAMES[tensor.dtype], tensor.numel()] for tensor in message.tensors],
        }
    ).encode()
    first = hmac.digest(key, header, "sha256") + _LENGTH.pack(len(header))
    tensors = (frame for tensor in message.tensors for frame in _cut(_bytes_of(tensor)))
    return [first, *_cut(memoryview(header)), *tensors]


def decode(frames: Iterable[Frame], key: bytes) -> Message:
    """The message in these frames; its tensors lie in the frames' memory. Raises Malformed.

    Frames are asked for one after the other, and those of tensors once the header is authenticated.
    """
    views = (memoryview(frame) for frame in frames)
    first = bytes(next(views, b""))
    if len(first) != _CODE_BYTES + _LENGTH.size:
        raise Malformed(f"{len(first)} bytes in the first frame, expected a code and a length")
    code, (length,) = first[:_CODE_BYTES], _LENGTH.unpack(first[_CODE_BYTES:])
    if not 0 < length <= _MAX_HEADER_BYTES:
        raise Malformed(f"a header of {length} bytes")
    header = b"".join(_taken(views, length))
    if not hmac.compare_digest(hmac.digest(key, header, "sha256"), code):
        raise Malformed("not authenticated by the token of this job's attempt")
    kind, fields, described = _parse(header)
    tensors = [_tensor(_taken(views, size * form.itemsize), form, size) for form, size in described]
    if next(views, None) is not None:
        raise Malformed("more frames than the header says")
    return Message(kind, fields, tensors)


def _cut(data: memoryview) -> Iterator[memoryview]:
    """Pieces of a frame's length; one that is empty where there is nothing, so that frames are counted easily."""
    yield data[:FRAME_BYTES]
    for start in range(FRAME_BYTES, data.nbytes, FRAME_BYTES):
        yield data[start : start + FRAME_BYTES]


def _taken(views: Iterator[memoryview], length: int) -> list[memoryview]:
    """The next frames, which are together so long. Raises Malformed."""
    pieces = max(1, -(-length // FRAME_BYTES))
    found = list(islice(views, pieces))
    if len(found) < pieces:
        raise Malformed(f"{len(found)} frames, the header says {pieces}")
    held = sum(piece.nbytes for piece in found)
    if held != length:
        raise Malformed(f"{held} bytes, the header says {length}")
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().contiguous().view(torch.uint8).numpy())


def _parse(header: bytes) -> tuple[str, dict[str, Any], list[tuple[torch.dtype, int]]]:
    try:
        parsed = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise Malformed("the header is not JSON") from error
    if not isinstance(parsed, dict):
        raise Malformed("the header is not an object")
    kind, fields, described = (parsed.get(name) for name in ("kind", "fields", "tensors"))
    if not (isinstance(kind, str) and isinstance(fields, dict) and isinstance(described, list)):
        raise Malformed("the header lacks its kind, fields or tensors")
    entries = []
    for entry in described:
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) and entry[0] in FORMATS):
            raise Malformed("a tensor of no known format")
        if type(entry[1]) is not int or entry[1] < 0:
            raise Malformed("a tensor of no length")
        entries.append((FORMATS[entry[0]], entry[1]))
    return kind, fields, entries


def _tensor(pieces: list[memoryview], number_format: torch.dtype, length: int) -> Tensor:
    if length == 0:
        return torch.empty(0, dtype=number_format)
    if len(pieces) > 1:
        whole = torch.empty(length, dtype=number_format)
        bytes_of_whole, at = memoryview(whole.view(torch.uint8).numpy()), 0
        for piece in pieces:
            bytes_of_whole[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return whole
    memory = pieces[0]
    if memory.readonly:
        memory = memoryview(bytearray(memory))
    found = torch.frombuffer(memory, dtype=torch.uint8)
    # A transport may begin a frame anywhere; numbers that cross their natural bounds are not every processor's.
    if found.data_ptr() % number_format.itemsize:
        found = found.clone()
    return found.view(number_format)
