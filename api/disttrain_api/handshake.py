"""The handshake as bytes: three messages of fixed lengths, after which both sides know that the other has the key.

    rank    -> gateway   hello: version, rank, world size, nonce of the rank
    gateway -> rank      answer: nonce of the gateway, code over hello and nonce
    rank    -> gateway   proof: code over hello and nonce

Codes are HMAC-SHA256 (RFC 2104) under the attempt's key, with a word for the direction, so that neither side's can be
sent back to it (ISO/IEC 9798-4, three-pass mutual authentication). A wrong rank or world size is refused.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

NONCE_BYTES = 32
_CODE_BYTES = 32
_VERSION = b"disttrain rendezvous 1\n"
_RANK = struct.Struct(">II")

HELLO_BYTES = len(_VERSION) + _RANK.size + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + _CODE_BYTES
PROOF_BYTES = _CODE_BYTES


class Refused(Exception):  # noqa: N818 - said of a connection
    """The other side does not belong to this attempt; the text says why."""


@dataclass(frozen=True)
class Hello:
    """Claimed identity of the other side. Nothing of this is trusted before the proof."""

    rank: int
    world_size: int


def hello_of(rank: int, world_size: int, nonce: bytes) -> bytes:
    """Return the first message."""
    return _VERSION + _RANK.pack(rank, world_size) + nonce


def read_hello(message: bytes, world_size: int) -> Hello:
    """Return the claimed identity from the first message, or from the part of it that has arrived.

    Raises Refused as soon as a byte differs from a hello, also before all of it has arrived.
    """
    if message[: len(_VERSION)] != _VERSION[: len(message)]:
        raise Refused("it speaks another protocol")
    if len(message) < HELLO_BYTES:
        return Hello(-1, -1)
    hello = Hello(*_RANK.unpack_from(message, len(_VERSION)))
    if hello.world_size != world_size or hello.rank >= world_size:
        raise Refused(f"it is rank {hello.rank} of {hello.world_size}, this world has {world_size}")
    return hello


def answer_to(hello: bytes, nonce: bytes, key: bytes) -> bytes:
    """Return the gateway's message."""
    return nonce + _code(key, b"gateway", hello, nonce)


def proof_for(hello: bytes, answer: bytes, key: bytes) -> bytes:
    """Return the rank's second message. Raises Refused where the answer comes from no gateway of this attempt."""
    nonce, code = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(code, _code(key, b"gateway", hello, nonce)):
        raise Refused("what listens there does not know the token of this attempt")
    return _code(key, b"rank", hello, nonce)


def check_proof(proof: bytes, hello: bytes, nonce: bytes, key: bytes) -> None:
    """Raise Refused where the proof is not that of a rank with the key."""
    if not hmac.compare_digest(proof, _code(key, b"rank", hello, nonce)):
        raise Refused("it does not know the token of this attempt")


def _code(key: bytes, direction: bytes, hello: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, direction + b"\n" + hello + nonce, "sha256")
