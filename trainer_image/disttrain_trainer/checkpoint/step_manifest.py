"""`manifest.json` of a checkpoint: each file's size and SHA-256 (FIPS 180-4), and what wrote it.

It is the last file of a checkpoint to be written, and carries a digest of its own, so that one changed or missing byte
anywhere in the folder is found.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from disttrain_api.base import ApiModel
from disttrain_trainer.runtime.files import is_plain_name, open_regular, out_of_reach, read_bounded, write_atomically
from disttrain_trainer.runtime.object_path import ObjectPath

MANIFEST_FILE = "manifest.json"
PENDING_FILE = "manifest.pending"
"""In an object store: the manifest of a checkpoint that is not committed yet."""

MAX_MANIFEST_BYTES = 2**26
"""One of 400,000 files has about as much."""
_BLOCK_BYTES = 2**20

Place = Path | ObjectPath


class Step(NamedTuple):
    """One checkpoint in a listing of them."""

    step: int
    number: int
    """The claim of who wrote it (fence.py): of two of one step, the higher counts. 0 where the name does not say."""
    name: str


class Listing(NamedTuple):
    """The checkpoints in a folder or below a prefix, each in order."""

    complete: list[Step]
    unfinished: list[Step]
    """Being written, or left over."""


class FileDigest(ApiModel):
    """A file as it was when the checkpoint was complete."""

    size: int
    """Bytes."""
    sha256: str
    """64 hexadecimal digits."""


class StepManifest(ApiModel):
    """Content of the file."""

    step: int
    """Optimizer steps done."""
    attempt: int
    """The attempt of the job that wrote it."""
    world_size: int
    """Ranks that wrote it."""
    mesh: dict[str, int]
    """Their degrees; a checkpoint can be loaded into any other."""
    figures: dict[str, float] = {}
    """What an evaluation at this step found on held-out data."""
    time: str = ""
    """When the last file was written, RFC 3339 in UTC."""
    files: dict[str, FileDigest] = {}
    """All files of the folder but this one, by name."""
    sha256: str = ""
    """The digest of this file's text with an empty string in this place."""

    def text(self) -> str:
        """The file's one form, digest filled in."""
        blank = self.model_copy(update={"sha256": ""})
        return _json(self.model_copy(update={"sha256": hashlib.sha256(_json(blank).encode()).hexdigest()}))


def digest_of(path: Place) -> FileDigest:
    """Reads the whole file. Raises OSError."""
    with open_regular(path) as file:
        digest, size = hashlib.sha256(), 0
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileDigest(size=size, sha256=digest.hexdigest())


def write_manifest(folder: Place, manifest: StepManifest) -> None:
    """Write it into the folder that it describes."""
    write_atomically(folder / (PENDING_FILE if isinstance(folder, ObjectPath) else MANIFEST_FILE), manifest.text())


def read_manifest(folder: Place, name: str = MANIFEST_FILE) -> StepManifest | str | None:
    """The manifest of a checkpoint; the flaw where it cannot be trusted; None where there is none.

    Checkpoints of earlier versions have none. Raises OSError where the storage does not answer.
    """
    path = folder / name
    try:
        text = read_bounded(path, MAX_MANIFEST_BYTES).decode()
        manifest = StepManifest.model_validate_json(text)
    except FileNotFoundError:
        return None
    except OSError as error:
        return unreadable(path, error)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{path} cannot be read: {first['msg']:.200}"
    except ValueError:
        return f"{path} cannot be read: it is no text"
    if manifest.text() != text:
        return f"{path} is not as it was written"
    strange = next((name for name in manifest.files if not is_plain_name(name)), None)
    if strange is not None:
        return f"{path} names `{strange!r:.200}`, which is no name in the checkpoint's own folder"
    return manifest


def flaws(folder: Place, manifest: StepManifest, names: Iterable[str]) -> list[str]:
    """A sentence for each of the named files that is not as the manifest says. Reads them whole.

    Raises OSError where the storage does not answer: nothing is known of the checkpoint then.
    """
    found = (_flaw(folder / name, manifest.files[name]) for name in names)
    return [flaw for flaw in found if flaw is not None]


def _flaw(path: Place, expected: FileDigest) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"{path} has {size} bytes, expected {expected.size}"
        if digest_of(path) != expected:
            return f"{path} has other bytes than were written"
    except OSError as error:
        return unreadable(path, error)
    return None


def unreadable(path: Place, error: OSError) -> str:
    """Return the flaw of a file that is damaged or foreign. Raises `error` where the storage does not answer."""
    if out_of_reach(error, path):
        raise error
    return f"{path} cannot be read: {error.strerror or error}"


def _json(manifest: StepManifest) -> str:
    return manifest.model_dump_json(by_alias=True, indent=1) + "\n"
