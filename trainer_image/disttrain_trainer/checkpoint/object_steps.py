"""Checkpoints in an object store, where nothing can be renamed: two objects together make one complete.

<prefix>/fence.000002.…                   who owns the prefix: claim number 2, see fence.py
<prefix>/step-20.1f3a9c2e-2/              written by claim 2, of the job whose uid begins so
<prefix>/step-20.1f3a9c2e-2/.metadata     written after all other ranks' objects
<prefix>/step-20.1f3a9c2e-2/manifest.json complete: this object is written last, after the fence is read
<prefix>/step-20.1f3a9c2e-2/broken        complete once, damaged now

Each owner writes below a name of its own, so one that lives on behind a network partition overwrites nothing. Its
successor deletes `.metadata` of what it finds unfinished: the manifest alone, which an old owner may still write when
it wakes up, makes nothing complete. Stores without strong consistency (S3 has had it since 2020) may show a deleted
object again.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from disttrain_trainer.checkpoint.step_manifest import (
    MANIFEST_FILE,
    PENDING_FILE,
    Listing,
    Step,
    StepManifest,
    read_manifest,
)
from disttrain_trainer.checkpoint.step_writer import METADATA_FILE
from disttrain_trainer.runtime.object_path import ObjectPath

_STEP = re.compile(r"step-(\d{1,15})\.[0-9a-zA-Z]+-(\d{1,15})")
_BROKEN = "broken"


@dataclass(frozen=True)
class ObjectSteps:
    """The checkpoints below a prefix; does for them what storage.StepFolders does for folders."""

    folder: ObjectPath
    uid: str = ""
    """The uid of the job that writes."""

    def look(self) -> Listing:
        """Return complete and incomplete checkpoints, in order of step and claim. Other entries are skipped."""
        found = Listing([], [])
        for place in self._places():
            names = self._names(place)
            if {MANIFEST_FILE, METADATA_FILE} <= names and _BROKEN not in names:
                found.complete.append(place)
            elif _BROKEN not in names:
                found.unfinished.append(place)
        return found

    def complete(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order."""
        return sorted({step.step for step in self.look().complete})

    def path(self, step: int) -> ObjectPath:
        """Return where the complete checkpoint of a step lies: the one that was committed last."""
        return self.folder / max(found for found in self.look().complete if found.step == step).name

    def partial(self, step: int, number: int) -> ObjectPath:
        """Return where the owner with this claim writes a checkpoint."""
        return self.folder / f"step-{step}.{self.uid.partition('-')[0] or 'job'}-{number}"

    def commit(self, partial: ObjectPath, step: int, number: int) -> ObjectPath:
        """Make a written checkpoint complete. Raises FileNotFoundError where a successor has taken it away."""
        text = (partial / PENDING_FILE).read_text()
        (partial / MANIFEST_FILE).write_text(text)
        (partial / PENDING_FILE).unlink(missing_ok=True)
        if not (partial / METADATA_FILE).exists():
            raise FileNotFoundError(None, "deleted while it was committed", str(partial))
        return partial

    def is_written(self, unfinished: Step) -> bool:
        """Return whether nothing is lacking but the commit."""
        if not {PENDING_FILE, METADATA_FILE} <= self._names(unfinished):
            return False
        manifest = read_manifest(self.folder / unfinished.name, PENDING_FILE)
        return isinstance(manifest, StepManifest) and manifest.step == unfinished.step

    def adopt(self, written: Step) -> None:
        """Commit what another owner has written."""
        # Its owner, or one after it, may have been faster.
        with suppress(FileNotFoundError):
            self.commit(self.folder / written.name, written.step, written.number)

    def set_aside(self, name: str) -> str:
        """Mark a damaged checkpoint, and return the mark: it counts no more, and a person can look at it."""
        (self.folder / name / _BROKEN).touch()
        return f"{name}/{_BROKEN}"

    def forget_broken(self, step: int) -> None:
        """Delete the damaged checkpoints up to this step, which has been reached again."""
        for place in self._places():
            if place.step <= step and _BROKEN in self._names(place):
                self.remove(place.name)

    def remove(self, name: str) -> None:
        """Delete a checkpoint. `.metadata` goes first: the manifest, an old owner may still write once more."""
        (self.folder / name / METADATA_FILE).unlink(missing_ok=True)
        (self.folder / name).remove_tree()

    def finish_removals(self) -> None:
        """Nothing to do: what is half deleted is unfinished."""

    def size(self, name: str) -> int:
        """Return 0: a store has no room to run out of."""
        return 0

    def _places(self) -> list[Step]:
        entries = ((entry.name, _STEP.fullmatch(entry.name)) for entry in self.folder.iterdir())
        return sorted(Step(int(match[1]), int(match[2]), name) for name, match in entries if match)

    def _names(self, place: Step) -> set[str]:
        return {entry.name for entry in (self.folder / place.name).iterdir()}
