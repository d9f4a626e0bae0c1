"""Snapshots of a server on the storage, from which a server resumes after its pod is recreated.

A snapshot is a message of this attempt as it would go over the wire, its frames one after the other with their lengths
before them: nothing is unpickled, and of what another attempt or somebody else has written the header alone is read.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from disttrain_trainer.parameter_server.protocol.wire import FRAME_BYTES, Malformed, Message, decode, encode
from disttrain_trainer.runtime.files import ForeignFileError, open_regular

_LENGTH = struct.Struct("<Q")


class Snapshots:
    """The snapshots of one server: a file, written by a thread while the server goes on."""

    def __init__(
        self, file: Path, key: bytes, claim: Path | None = None, written: Callable[[], None] = lambda: None
    ) -> None:
        """`claim`: of `claim_incarnation`: nothing is written after a later one. `written`: the thread calls it."""
        self._file, self._key, self._claim, self._written = file, key, claim, written
        self._writer: threading.Thread | None = None

    def write(self, message: Message) -> None:
        """Begin to write, once the one before is written; the message's tensors must not change any more."""
        if self._writer is not None:
            self._writer.join()
        self._writer = threading.Thread(target=self._write, args=(message,), name="snapshot", daemon=True)
        self._writer.start()

    def read(self) -> Message | None:
        """The last complete snapshot of this attempt, None where there is none."""
        try:
            with open_regular(self._file) as file:
                return decode(_frames(file), self._key)
        except (FileNotFoundError, ForeignFileError, Malformed):
            return None

    def _write(self, message: Message) -> None:
        partial = self._file.with_suffix(".part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Others may have put a link there: what was left is removed, and what comes in between is not opened.
            partial.unlink(missing_ok=True)
            with partial.open("xb") as file:
                for frame in encode(message, self._key):
                    file.write(_LENGTH.pack(memoryview(frame).nbytes))
                    file.write(frame)
                file.flush()
                os.fsync(file.fileno())
            # A claim that was removed may have been followed by another one.
            if self._claim is None or _claims(self._claim)[-1:] == [self._claim]:
                partial.replace(self._file)
                self._written()
        except OSError as error:
            # Checkpoints meet the same wall and end the job; a missing snapshot alone does not.
            print(f"disttrain: {self._file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def claim_incarnation(folder: Path, index: int, attempt: int) -> tuple[Path, int]:
    """Create the file that claims the next incarnation of this server in the attempt; return it and the number, from 1.

    No two incarnations have the same number. Raises OSError where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    incarnation = 1
    while True:
        # `life` stays the name on the volume: counting goes on where an older image began.
        file = folder / f"server-{index}.attempt-{attempt:06d}.life-{incarnation:06d}"
        try:
            file.touch(exist_ok=False)
        except FileExistsError:
            incarnation += 1
            continue
        for old in _claims(file):
            # Those of this attempt are what the number is counted by.
            if old < folder / f"server-{index}.attempt-{attempt:06d}":
                old.unlink(missing_ok=True)
        return file, incarnation


def _claims(claim: Path) -> list[Path]:
    """All claims of the same server, the latest last."""
    return sorted(claim.parent.glob(f"{claim.name.partition('.')[0]}.attempt-*.life-*"))


def _frames(file: IO[bytes]) -> Iterator[bytearray]:
    """The frames of a snapshot, read when they are asked for. Raises Malformed where one is too long or cut off."""
    while start := file.read(_LENGTH.size):
        if len(start) < _LENGTH.size:
            raise Malformed("a snapshot ends within a length")
        (length,) = _LENGTH.unpack(start)
        if length > FRAME_BYTES:
            raise Malformed(f"a frame of {length} bytes, expected at most {FRAME_BYTES}")
        frame = bytearray(file.read(length))
        if len(frame) < length:
            raise Malformed("a snapshot ends within a frame")
        yield frame
