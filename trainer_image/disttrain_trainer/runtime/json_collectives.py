"""Collectives of small values: bounded JSON in byte tensors, checked against the type that the receiver expects.

torch's object collectives (`all_gather_object`, `broadcast_object_list`, …) unpickle what arrives, and a pickle runs
code. Connections between ranks are not authenticated one by one (gloo's are not at all), so nothing that arrives here
is more than data. `kind` is any type that pydantic can check: `int`, `list[Transfer]`, `str | None`, a dataclass, a
model.

All calls go over CPU tensors, which each process group carries. A rank that receives what is no such value raises
PeerLost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError
from torch import Tensor

from disttrain_trainer.runtime.errors import PeerLost

T = TypeVar("T")

MAX_BYTES = 64 * 2**20
"""Longest value as JSON. The plan of a checkpoint with 100,000 tensors has about 30 MiB."""

MAX_BYTES_OF_ALL = 512 * 2**20
"""What an all-gather may take on each rank: the longest value once for every rank, for they arrive padded to it. So
much, at least, the first rank takes of what all send to it."""

TIMES_AS_MUCH = 4
"""How much more than its own value the first rank takes of each rank, on average."""


def _dtype_named(name: object) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.40} is no number format")
    return found


Dtype = Annotated[
    torch.dtype, PlainValidator(_dtype_named), PlainSerializer(lambda dtype: str(dtype).removeprefix("torch."))
]
"""A number format, by its name in torch."""
Form = tuple[tuple[int, ...], Dtype]
"""Shape and number format of a tensor."""


def form_of(tensor: Tensor) -> Form:
    """Return what a receiver must know to make room for the tensor."""
    return tuple(tensor.shape), tensor.dtype


def encode(value: object, kind: Any) -> bytes:
    """Return the JSON of a value. Raises ValueError where it is larger than MAX_BYTES.

    A lone surrogate in a text, which no reader of JSON takes, becomes a question mark.
    """
    # Not dump_json, which writes inf and nan as null.
    plain = _adapter(kind).dump_python(value, mode="json")
    data = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
    if len(data) > MAX_BYTES:
        raise ValueError(f"a value of {len(data)} bytes is not for a collective of small values: {MAX_BYTES} at most")
    return data


def decode(data: bytes, kind: Any) -> Any:
    """Return the value in this JSON. Raises ValueError where it is no `kind`; pydantic bounds the depth."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{len(data)} bytes, expected at most {MAX_BYTES}")
    return _adapter(kind).validate_json(data)


def all_gather(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank of the group, in order of rank, on every rank.

    Raises PeerLost, on every rank, where they would take more than MAX_BYTES_OF_ALL.
    """
    own = _tensor(encode(value, kind))
    sizes = _sizes_of_all(own, group)
    if len(sizes) * max(sizes) > MAX_BYTES_OF_ALL:
        longest = sizes.index(max(sizes))
        too_much = f"{max(sizes)} bytes, which for each of {len(sizes)} ranks are more than {MAX_BYTES_OF_ALL} together"
        raise PeerLost(_stranger(longest, f"a value of {too_much}"))
    received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
    dist.all_gather(received, _padded(own, max(sizes)), group)
    return [_value(found, size, kind, rank) for rank, (found, size) in enumerate(zip(received, sizes, strict=True))]


def gather(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the value of every rank on the group's first rank; elsewhere an empty list.

    The first rank reads one after the other, as long as each is. Raises PeerLost, on every rank, where they would take
    more than `most_of_all`.
    """
    own = encode(value, kind)
    sizes = _sizes_of_all(_tensor(own), group)
    if sum(sizes) > (most := most_of_all(sizes)):
        too_much = f"{max(sizes)} bytes, which with those of {len(sizes) - 1} other ranks are more than {most}"
        raise PeerLost(_stranger(sizes.index(max(sizes)), f"a value of {too_much}"))
    if dist.get_rank(group) != 0:
        dist.send(_tensor(own), group=group, group_dst=0)
        return []
    found: list[T] = [decode(own, kind)]
    for rank, size in enumerate(sizes[1:], start=1):
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, group=group, group_src=rank)
        found.append(_value(data, size, kind, rank))
    return found


def most_of_all(sizes: Sequence[int]) -> int:
    """Return the bytes that the first of the ranks that send so many takes of them all.

    What ranks send to it grows with the model and the job, and is about as much for each: so it goes by its own.
    """
    return max(MAX_BYTES_OF_ALL, TIMES_AS_MUCH * sizes[0] * len(sizes))


def scatter(values: Sequence[T], kind: Any, group: dist.ProcessGroup | None = None) -> T:
    """Return, on each rank, its own of the `values` that the group's first rank has."""
    members = dist.get_process_group_ranks(group)
    if dist.get_rank(group) != 0:
        found: T = receive(kind, members[0], group)
        return found
    for rank, value in zip(members[1:], values[1:], strict=True):
        send(value, kind, rank, group)
    return values[0]


def broadcast(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> T:
    """Return, on every rank, the value of the group's first rank; what others give does not count."""
    first = dist.get_rank(group) == 0
    data = _tensor(encode(value, kind)) if first else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group=group, group_src=0)
    if not first:
        data = torch.empty(_size(int(size), 0), dtype=torch.uint8)
    dist.broadcast(data, group=group, group_src=0)
    return _value(data, len(data), kind, 0)


def send(value: object, kind: Any, to: int, group: dist.ProcessGroup | None = None) -> None:
    """Send a value to the global rank `to`, which calls `receive`."""
    data = _tensor(encode(value, kind))
    dist.send(torch.tensor([len(data)]), to, group)
    dist.send(data, to, group)


def receive(kind: Any, sender: int, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value that the global rank `sender` sends."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, sender, group)
    data = torch.empty(_size(int(size), sender), dtype=torch.uint8)
    dist.recv(data, sender, group)
    return _value(data, len(data), kind, sender)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _padded(data: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, length - len(data)))


def _sizes_of_all(own: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    received = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, torch.tensor([len(own)]), group)
    return [_size(int(size), rank) for rank, size in enumerate(received)]


def _size(size: int, rank: int) -> int:
    if not 0 < size <= MAX_BYTES:
        raise PeerLost(_stranger(rank, f"a value of {size} bytes"))
    return size


def _value(data: Tensor, size: int, kind: Any, rank: int) -> Any:
    try:
        return decode(data[:size].numpy().tobytes(), kind)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise PeerLost(_stranger(rank, f"no {kind}: {first['msg']:.200}")) from error
    except ValueError as error:
        raise PeerLost(_stranger(rank, str(error))) from error


def _stranger(rank: int, found: str) -> str:
    return f"rank {rank} does not speak as one of this job: it sent {found}"
