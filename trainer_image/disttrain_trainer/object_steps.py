"""Checkpoints in an object store, where nothing can be renamed: an object written last commits.

<prefix>/fence.json                       owner, see fence.py
<prefix>/step-20.1f3a9c2e-1/              written by attempt 1 of the job whose uid begins so
<prefix>/step-20.1f3a9c2e-1/manifest.json complete: this object is written after all others, and after the fence is read
<prefix>/step-20.1f3a9c2e-1/broken        complete once, damaged now

Each attempt writes below a name of its own, so one that lives on behind a network partition overwrites nothing. Between
reading the fence and writing the manifest lies a moment in which it can still add a complete checkpoint of its own
step, as with folders. Stores without strong consistency (S3 has had it since 2020) may show a deleted object again.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from disttrain_trainer.object_path import ObjectPath
from disttrain_trainer.step_manifest import MANIFEST_FILE, PENDING_FILE

_STEP = re.compile(r"step-(\d+)\.[0-9a-zA-Z]+-\d+")
_BROKEN = "broken"


@dataclass(frozen=True)
class ObjectSteps:
    """The checkpoints below a prefix; does for them what storage.StepFolders does for folders."""

    folder: ObjectPath
    uid: str = ""
    """Of the job that writes."""

    def complete(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return sorted(step for step, places in self._places().items() if any(map(_is_complete, places)))

    def path(self, step: int) -> ObjectPath:
        """Where the complete checkpoint of a step lies; the one that was committed last."""
        places = [place for place in self._places()[step] if _is_complete(place)]
        return max(places, key=lambda place: float((place / MANIFEST_FILE).stat().st_mtime))

    def partial(self, step: int, attempt: int) -> ObjectPath:
        """Where an attempt writes it."""
        return self.folder / f"step-{step}.{self.uid.partition('-')[0] or 'job'}-{attempt}"

    def commit(self, partial: ObjectPath, step: int) -> ObjectPath:
        """Make a written checkpoint complete, in place of others of the same step and damaged ones up to it."""
        text = (partial / PENDING_FILE).read_text()
        (partial / MANIFEST_FILE).write_text(text)
        (partial / PENDING_FILE).unlink()
        for found, places in self._places().items():
            for place in places:
                if place != partial and (found == step or (found < step and (place / _BROKEN).exists())):
                    self.remove(place)
        return partial

    def set_aside(self, step: int) -> ObjectPath:
        """Mark a damaged checkpoint: it counts no more, and a person can still look at it."""
        path = self.path(step)
        (path / _BROKEN).touch()
        return path / _BROKEN

    def keep(self, steps: set[int]) -> None:
        """Delete all complete checkpoints but those of `steps`."""
        for step, places in self._places().items():
            for place in places:
                if step not in steps and _is_complete(place):
                    self.remove(place)

    def remove(self, path: ObjectPath) -> None:
        """Delete a checkpoint, the manifest first, so that a half deleted one is never taken for complete."""
        (path / MANIFEST_FILE).unlink(missing_ok=True)
        path.remove_tree()

    def discard(self, partial: ObjectPath) -> int:
        """Delete what was written of a checkpoint that failed; returns 0, since a store has no room to run out of."""
        partial.remove_tree()
        return 0

    def clean(self) -> None:
        """Delete what earlier attempts left unfinished."""
        for places in self._places().values():
            for place in places:
                if not (place / MANIFEST_FILE).is_file():
                    place.remove_tree()

    def _places(self) -> dict[int, list[ObjectPath]]:
        found: dict[int, list[ObjectPath]] = defaultdict(list)
        for entry in self.folder.iterdir():
            match = _STEP.fullmatch(entry.name)
            if match:
                found[int(match[1])].append(entry)
        return found


def _is_complete(place: ObjectPath) -> bool:
    return (place / MANIFEST_FILE).is_file() and not (place / _BROKEN).exists()
