"""How the numbers of one range are written when they are pushed. Pure: 1-D tensors -> tensors to send -> 1-D tensors.

Nothing that a server is sent is trusted: `decode` raises Malformed where tensors do not fit the range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from disttrain_api.parallelism import Compression, CompressionName
from disttrain_trainer.compression.blocks import BLOCK, INT8, ONE_BIT, Codec
from disttrain_trainer.compression.sparse import DEFAULT_RATIO, kept_count, largest, random_indices, ratio_at
from disttrain_trainer.parameter_server.protocol.wire import Malformed

_FORMATS = {CompressionName.FP16: torch.float16, CompressionName.BF16: torch.bfloat16}
_CPU = torch.device("cpu")


class Piece(NamedTuple):
    """A pushed piece: range `place` of `server`, for a part of a step."""

    step: int
    part: int
    server: int
    place: int


class PushCodec(ABC):
    """One way of writing."""

    feedback = False
    """Whether what is lost is to be added to what is pushed next."""

    @abstractmethod
    def encode(self, values: Tensor, piece: Piece) -> list[Tensor]:
        """Numbers [n] -> 1-D tensors."""

    @abstractmethod
    def decode(self, tensors: Sequence[Tensor], size: int, number_format: torch.dtype, piece: Piece) -> Tensor:
        """The numbers [size] in the range's format. Raises Malformed."""


class PlainCodec(PushCodec):
    """Send the numbers as they are, or in a shorter format."""

    def __init__(self, number_format: torch.dtype | None = None) -> None:
        self._format = number_format

    def encode(self, values: Tensor, piece: Piece) -> list[Tensor]:
        return [values if self._format is None else values.to(self._format)]

    def decode(self, tensors: Sequence[Tensor], size: int, number_format: torch.dtype, piece: Piece) -> Tensor:
        require(tensors, (size, self._format or number_format))
        return tensors[0].to(number_format)


class BlockCodec(PushCodec):
    """Few bits per number and a scale per block; everything during the warm-up."""

    def __init__(self, codec: Codec, *, bits: int, feedback: bool, warmup_steps: int = 0) -> None:
        self._codec, self._bits, self._warmup_steps = codec, bits, warmup_steps
        self._packed = torch.int8 if bits == 8 else torch.uint8
        self.feedback = feedback

    def encode(self, values: Tensor, piece: Piece) -> list[Tensor]:
        return [values] if piece.step < self._warmup_steps else self._codec.encode(values)

    def decode(self, tensors: Sequence[Tensor], size: int, number_format: torch.dtype, piece: Piece) -> Tensor:
        if piece.step < self._warmup_steps:
            require(tensors, (size, number_format))
            return tensors[0]
        require(tensors, (-(-size * self._bits // 8), self._packed), (-(-size // BLOCK), number_format))
        return self._codec.decode(tensors, size)


class SparseCodec(PushCodec):
    """Send some of the numbers, zeros for the others: the largest ones, with their indices, or random ones, whose
    indices the server draws itself.
    """

    feedback = True

    def __init__(self, settings: Compression, seed: int) -> None:
        self._random, self._seed = settings.name is CompressionName.RANDOM_K, seed
        self._ratio = DEFAULT_RATIO if settings.ratio is None else settings.ratio
        self._warmup_steps = settings.warmup_steps or 0

    def encode(self, values: Tensor, piece: Piece) -> list[Tensor]:
        size = values.numel()
        count = self._count(size, piece)
        if self._random:
            return [values[self._drawn(size, piece, values.device)]]
        indices = largest(values, count)
        return [values] if count == size else [values[indices], indices.to(_format_of_places(size))]

    def decode(self, tensors: Sequence[Tensor], size: int, number_format: torch.dtype, piece: Piece) -> Tensor:
        count = self._count(size, piece)
        if count == size and not self._random:
            require(tensors, (size, number_format))
            return tensors[0]
        places = () if self._random else ((count, _format_of_places(size)),)
        require(tensors, (count, number_format), *places)
        numbers = torch.zeros(size, dtype=number_format, device=tensors[0].device)
        return numbers.index_copy_(0, self.places(tensors, size, piece), tensors[0])

    def places(self, tensors: Sequence[Tensor], size: int, piece: Piece) -> Tensor:
        """Indices [count] of the numbers that are sent. Raises Malformed where they are none of the range."""
        device = tensors[0].device
        if self._random:
            return self._drawn(size, piece, device)
        if len(tensors) == 1:
            return torch.arange(size, device=device)
        return ascending(tensors[1].to(torch.int64), size)

    def _count(self, size: int, piece: Piece) -> int:
        return kept_count(size, ratio_at(piece.step, self._ratio, self._warmup_steps))

    def _drawn(self, size: int, piece: Piece, device: torch.device) -> Tensor:
        # On the CPU, as the server does it: other devices draw other numbers.
        return random_indices(size, self._count(size, piece), (self._seed, *piece), _CPU).to(device)


def build_codec(compression: Compression | None, seed: int) -> PushCodec:
    """The way that the manifest asks for; `seed` is the job's."""
    if compression is None:
        return PlainCodec()
    match compression.name:
        case CompressionName.FP16 | CompressionName.BF16:
            return PlainCodec(_FORMATS[compression.name])
        case CompressionName.INT8:
            return BlockCodec(INT8, bits=8, feedback=False)
        case CompressionName.ONE_BIT:
            return BlockCodec(ONE_BIT, bits=1, feedback=True, warmup_steps=compression.warmup_steps or 0)
        case CompressionName.TOP_K | CompressionName.RANDOM_K:
            return SparseCodec(compression, seed)
        case CompressionName.POWER_SGD:
            raise ValueError("PowerSGD is no way of writing ranges; a rule refuses it")


def require(tensors: Sequence[Tensor], *expected: tuple[int, torch.dtype]) -> None:
    """Raises Malformed where the tensors have not these lengths and formats."""
    found = [(tensor.numel(), tensor.dtype) for tensor in tensors]
    if found != list(expected):
        raise Malformed(f"a range of tensors {found}, expected {list(expected)}"[:300])


def ascending(places: Tensor, size: int) -> Tensor:
    """The places [n], if they ascend and lie below `size`. Raises Malformed."""
    if len(places) and not (places[0] >= 0 and places[-1] < size and (places.diff() > 0).all()):
        raise Malformed(f"places that are not {len(places)} ascending ones below {size}")
    return places


def _format_of_places(size: int) -> torch.dtype:
    return torch.int32 if size < 2**31 else torch.int64
