"""Codecs that send every number in few bits, with a scale per block of neighbours. Pure functions of 1-D tensors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 256
"""Numbers that share a scale: layers differ by orders of magnitude, and a scale costs no more than 2 % of INT8."""
_LARGEST = 127
_BITS = 8


@dataclass(frozen=True)
class Codec:
    """1-D tensor -> payload -> 1-D tensor of the same size, unlike the first by what the payload does not hold."""

    encode: Callable[[Tensor], list[Tensor]]
    """Values [n] -> 1-D tensors, whose sizes depend on n alone."""
    decode: Callable[[Sequence[Tensor], int], Tensor]
    """Payload, n -> values [n]."""


def encode_int8(values: Tensor) -> list[Tensor]:
    """[n] -> [n] int8 and [blocks] scales: numbers are rounded to 1/127 of the largest magnitude of their block.

    Blocks with inf or nan come out without a finite number, so that the trainer sees them.
    """
    blocks = _in_blocks(values)
    scales = blocks.abs().amax(1) / _LARGEST
    steps = blocks / torch.where(scales == 0, 1, scales)[:, None]
    # Above 127 only where the scale itself is subnormal, hence rounded.
    steps = steps.round().clamp(-_LARGEST, _LARGEST)
    return [steps.to(torch.int8).view(-1)[: values.numel()], scales]


def decode_int8(payload: Sequence[Tensor], size: int) -> Tensor:
    """The opposite of `encode_int8`, to half a scale."""
    steps, scales = payload
    return (_in_blocks(steps.to(scales.dtype)) * scales[:, None]).view(-1)[:size]


def encode_one_bit(values: Tensor) -> list[Tensor]:
    """[n] -> the signs, eight to a byte, and the mean magnitude of each block (Seide et al. 2014, section 2.1, with one
    magnitude for both signs as in Karimireddy et al. 2019). Needs error feedback.
    """
    blocks = _in_blocks(values)
    counts = _in_blocks(torch.ones_like(values)).sum(1)
    bits = (blocks >= 0).view(-1, _BITS).to(torch.uint8)
    used = -(-values.numel() // _BITS)
    return [(bits << _shifts(bits)).sum(1, dtype=torch.uint8)[:used], blocks.abs().sum(1) / counts]


def decode_one_bit(payload: Sequence[Tensor], size: int) -> Tensor:
    """Signs times magnitudes."""
    packed, magnitudes = payload
    bits = (packed[:, None] >> _shifts(packed)) & 1
    signs = bits.view(-1)[:size].to(magnitudes.dtype) * 2 - 1
    return (_in_blocks(signs) * magnitudes[:, None]).view(-1)[:size]


INT8 = Codec(encode_int8, decode_int8)
ONE_BIT = Codec(encode_one_bit, decode_one_bit)


def _in_blocks(values: Tensor) -> Tensor:
    """[n] -> [blocks, BLOCK], filled up with zeros."""
    return torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=like.device)
