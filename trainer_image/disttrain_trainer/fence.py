"""Which attempt owns the checkpoints of a folder.

A pod on a node that is cut off may still run while its successor trains. Rank 0 of an attempt writes its number into
`fence.json` when it starts and reads it again before it commits a checkpoint; who finds a newer owner commits nothing.
Between that reading and the rename that commits lies a moment in which an old attempt can still win; it can only add a
complete checkpoint of its own step, never damage one.
"""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from disttrain_trainer.errors import Fenced
from disttrain_trainer.files import write_atomically
from disttrain_trainer.object_path import ObjectPath

FENCE_FILE = "fence.json"


class Owner(BaseModel):
    """Content of the fence file."""

    uid: str
    attempt: int


@dataclass(frozen=True)
class Fence:
    """The fence of a checkpoint folder, as one attempt sees it."""

    folder: Path | ObjectPath
    owner: Owner

    def take(self) -> None:
        """Become the owner. Raises Fenced where a later attempt of the same job already is."""
        found = self._read()
        if found is not None and found.uid == self.owner.uid and found.attempt > self.owner.attempt:
            raise Fenced(
                f"{self.folder} belongs to attempt {found.attempt} of this job, this is attempt {self.owner.attempt}"
            )
        write_atomically(self.folder / FENCE_FILE, self.owner.model_dump_json())

    def check(self) -> None:
        """Raises Fenced where another job or a later attempt has become the owner."""
        found = self._read()
        if found is None or (found.uid == self.owner.uid and found.attempt <= self.owner.attempt):
            return
        who = f"attempt {found.attempt} of this job" if found.uid == self.owner.uid else f"the job with uid {found.uid}"
        raise Fenced(f"{who} has taken over {self.folder}; attempt {self.owner.attempt} commits no checkpoint any more")

    def _read(self) -> Owner | None:
        try:
            return Owner.model_validate_json((self.folder / FENCE_FILE).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None
