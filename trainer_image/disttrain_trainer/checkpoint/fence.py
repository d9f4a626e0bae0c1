"""Which attempt owns the checkpoints of a folder.

A pod on a node that is cut off may still run while its successor trains. Who is to write checkpoints first makes a file
whose name says who it is and is nobody else's, with a number above all that are there: a claim. The claim with the
highest number owns the folder. Two that claim in the same moment may find the same number; each looks again after it
has made its claim, and so at least one of them sees both. Then the higher claim stays and takes a number above the
other's, and the lower one is given up: no two that have taken the fence have the same number.

Claims need no more than a listing that shows what was made before it, which file systems and S3 have; nothing is read
from them, so none can be damaged, and none is overwritten. `check` alone cannot keep an attempt from committing that is
overtaken right after it: see owned_steps.py.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex

from pydantic import BaseModel, Field, ValidationError

from disttrain_trainer.runtime.errors import CheckpointBroken, CheckpointsTaken, Fenced
from disttrain_trainer.runtime.files import ForeignFileError, look_afresh, read_bounded, sync_folder, write_atomically
from disttrain_trainer.runtime.object_path import ObjectPath

OLD_FENCE_FILE = "fence.json"
"""How earlier versions did it: one file that each attempt overwrote."""
_MAX_OLD_BYTES = 2**16
_BEGINNING = "fence."
_NAME = re.compile(r"fence\.(\d{1,15})\.(\d{1,15})\.([0-9a-f]{1,32})\.([A-Za-z0-9_-]{0,100})")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, order=True)
class Claim:
    """One process that has claimed the folder; the highest counts."""

    number: int
    attempt: int
    nonce: str
    """Id of the process: an attempt's first pod may be replaced."""
    uid: str
    """Uid of the job."""

    @property
    def file_name(self) -> str:
        return f"{_BEGINNING}{self.number:06d}.{self.attempt}.{self.nonce}.{self.uid}"


@dataclass(frozen=True)
class Taken:
    """A claim that was taken."""

    number: int
    """Nobody else has it."""
    before: int
    """That of the claim which was the highest until then; 0 for none."""


class _OldFence(BaseModel):
    uid: str
    attempt: int = Field(ge=0, lt=10**15)


@dataclass
class Fence:
    """The fence of a checkpoint folder, as one process sees it."""

    folder: Path | ObjectPath
    uid: str
    attempt: int
    _nonce: str = field(default_factory=lambda: token_hex(4))
    _own: Claim | None = None

    def __post_init__(self) -> None:
        self.uid = _NOT_IN_NAMES.sub("_", self.uid)[:100]

    def take(self) -> Taken:
        """Become the owner.

        Raises Fenced where a later attempt of the same job is, CheckpointsTaken where another job has become it since
        this job was, CheckpointBroken where it cannot be told.
        """
        while True:
            claims = self._claims()
            self._require_own_to_be_last(claims)
            others = [claim for claim in claims if claim != self._own]
            highest = max((claim.number for claim in others), default=0)
            if self._own in claims and self._own is not None and self._own.number > highest:
                break
            self._own = Claim(highest + 1, self.attempt, self._nonce, self.uid)
            # For people; and a disk without room for it has none for a checkpoint.
            text = f"attempt {self.attempt} of the job with uid {self.uid} writes checkpoints here\n"
            write_atomically(self.folder / self._own.file_name, text)
        sync_folder(self.folder)
        for claim in others:
            # The last claim of each other job says that it was here.
            if claim.uid == self.uid:
                (self.folder / claim.file_name).unlink(missing_ok=True)
        return Taken(self._own.number, highest)

    def check(self) -> None:
        """Raises Fenced, CheckpointsTaken or CheckpointBroken where this process is the owner no more."""
        look_afresh(self.folder)
        self._require_own_to_be_last(self._claims())

    def _require_own_to_be_last(self, claims: list[Claim]) -> None:
        of_job = [claim for claim in claims if claim.uid == self.uid and claim.nonce != self._nonce]
        later = max((claim.attempt for claim in of_job), default=0)
        if later > self.attempt:
            raise Fenced(f"{self.folder} belongs to attempt {later} of this job, this is attempt {self.attempt}")
        if self._own is not None and any(claim > self._own for claim in of_job if claim.attempt == self.attempt):
            raise Fenced(f"{self.folder} belongs to another process of attempt {self.attempt}, which has begun later")
        own = max([*of_job, *filter(None, [self._own])], default=None)
        other = max((claim for claim in claims if claim.uid != self.uid), default=None)
        if own is not None and other is not None and other > own:
            raise CheckpointsTaken(
                f"the job with uid {other.uid} has taken over {self.folder}: two jobs cannot write checkpoints to one "
                "folder; give one of them another `training.checkpoint.folder`"
            )

    def _claims(self) -> list[Claim]:
        found = []
        for entry in self.folder.iterdir():
            if entry.name == OLD_FENCE_FILE:
                found.append(_old_claim(entry))
            elif entry.name.startswith(_BEGINNING):
                match = _NAME.fullmatch(entry.name)
                if match is None:
                    raise CheckpointBroken(f"{entry} is no claim that this version knows: remove it if nobody uses it")
                found.append(Claim(int(match[1]), int(match[2]), match[3], match[4]))
        return found


def _old_claim(path: Path | ObjectPath) -> Claim:
    """Return what an earlier version has claimed."""
    try:
        old = _OldFence.model_validate_json(read_bounded(path, _MAX_OLD_BYTES))
    except (ForeignFileError, ValidationError) as error:
        raise CheckpointBroken(
            f"{path} does not say which attempt of which job owns the folder: remove it if no other job writes here"
        ) from error
    # So that what is claimed from now on is above what that version has named by its attempts.
    return Claim(old.attempt, old.attempt, "", _NOT_IN_NAMES.sub("_", old.uid)[:100])
