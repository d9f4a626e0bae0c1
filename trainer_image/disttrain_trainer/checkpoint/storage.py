"""The folder that holds a job's checkpoints: which are complete, which go, and whether all ranks see the same folder.

<folder>/fence.000002.…      who owns the folder: claim number 2, see fence.py
<folder>/metrics.jsonl       one line per logged step
<folder>/samples.jsonl       one line per text that was written at an evaluation
<folder>/step-20/            complete: it got this name by one rename after everything in it was written
<folder>/step-20.2/          the same step, written by claim 2 while `step-20` was there: the last one counts
<folder>/step-40.broken/     was complete, is damaged: not as its manifest says; goes when step 40 is reached again
<folder>/step-30.partial-2   being written by claim 2, or left over
<folder>/step-10.deleting-…  on its way out, or left over
"""

import errno
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from disttrain_api.report import CheckpointReport
from disttrain_trainer.checkpoint.object_steps import ObjectSteps
from disttrain_trainer.checkpoint.step_manifest import Listing, Place, Step, StepManifest, read_manifest
from disttrain_trainer.checkpoint.step_writer import METADATA_FILE
from disttrain_trainer.runtime.errors import InvalidConfiguration, StorageFull, StorageNotShared, no_room
from disttrain_trainer.runtime.files import remove_tree, sync_folder
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.object_path import ObjectPath

_STEP = re.compile(r"step-(\d{1,15})(?:\.(\d{1,15}))?")
_PARTIAL = re.compile(r"step-(\d{1,15})\.partial-(\d{1,15})")
_DELETING = re.compile(r"step-\d{1,15}\S*\.deleting\S*")
_BROKEN = re.compile(r"step-(\d{1,15})(?:\.\d{1,15})?\.broken")

SHARED_WITHIN_SECONDS = 15.0
"""How long a file of rank 0 may take to be seen by another rank."""
_LOOK_AGAIN_SECONDS = 0.1
_OCCUPIED = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}
"""How a rename is refused where something has the name already."""


@dataclass(frozen=True)
class StepFolders:
    """The `step-N` folders of a checkpoint folder. Only rank 0 changes anything.

    Every change is one rename, and names of what is being written or deleted are used once. So a process that dies
    between any two leaves nothing half done, and one that was overtaken and wakes up late finds its folder gone.
    """

    folder: Path

    def look(self) -> Listing:
        """Return complete and incomplete checkpoints, in order of step and claim. Other entries are skipped."""
        found = Listing([], [])
        for entry in self.folder.iterdir():
            complete, partial = _STEP.fullmatch(entry.name), _PARTIAL.fullmatch(entry.name)
            # A link may lead anywhere.
            if complete and not entry.is_symlink() and (entry / METADATA_FILE).is_file():
                found.complete.append(Step(int(complete[1]), int(complete[2] or 0), entry.name))
            elif partial:
                found.unfinished.append(Step(int(partial[1]), int(partial[2]), entry.name))
        return Listing(sorted(found.complete), sorted(found.unfinished))

    def complete(self) -> list[int]:
        """Return the steps with a complete checkpoint, in order."""
        return sorted({step.step for step in self.look().complete})

    def path(self, step: int) -> Path:
        """Return where the complete checkpoint of a step lies: the one that was committed last."""
        return self.folder / max(found for found in self.look().complete if found.step == step).name

    def partial(self, step: int, number: int) -> Path:
        """Return where the owner with this claim writes a checkpoint before it is complete."""
        return self.folder / f"step-{step}.partial-{number}"

    def commit(self, partial: Path, step: int, number: int) -> Path:
        """Make a written checkpoint complete. Raises FileNotFoundError where a successor has taken it away."""
        sync_folder(partial)
        path, once_more = self.folder / f"step-{step}", self.folder / f"step-{step}.{number}"
        if step in self.complete():
            path = once_more
        try:
            partial.rename(path)
        except OSError as error:
            # What has the name is no checkpoint.
            if error.errno not in _OCCUPIED:
                raise
            path = once_more
            partial.rename(path)
        sync_folder(self.folder)
        return path

    def is_written(self, unfinished: Step) -> bool:
        """Return whether nothing is lacking but the commit: the manifest is the last file to be written."""
        manifest = read_manifest(self.folder / unfinished.name)
        return isinstance(manifest, StepManifest) and manifest.step == unfinished.step

    def adopt(self, written: Step) -> None:
        """Commit what another owner has written, unless the step is there already."""
        partial = self.folder / written.name
        try:
            sync_folder(partial)
            partial.rename(self.folder / f"step-{written.step}")
        except OSError as error:
            if error.errno not in {*_OCCUPIED, errno.ENOENT}:
                raise
        sync_folder(self.folder)

    def set_aside(self, name: str) -> str:
        """Give a damaged checkpoint another name, and return it: it counts no more, and a person can look at it."""
        aside = f"{name}.broken"
        remove_tree(self.folder / aside)
        (self.folder / name).rename(self.folder / aside)
        return aside

    def forget_broken(self, step: int) -> None:
        """Delete the damaged checkpoints up to this step, which has been reached again."""
        for entry in self.folder.iterdir():
            match = _BROKEN.fullmatch(entry.name)
            if match and int(match[1]) <= step:
                remove_tree(entry)

    def remove(self, name: str) -> None:
        """Delete a checkpoint; renamed first, so that a half deleted one is never taken for complete."""
        renamed = self.folder / f"{name}.deleting-{token_hex(4)}"
        # Somebody else may have been faster.
        with suppress(FileNotFoundError):
            (self.folder / name).rename(renamed)
            remove_tree(renamed)

    def finish_removals(self) -> None:
        """Delete what others have left half deleted."""
        for entry in self.folder.iterdir():
            if _DELETING.fullmatch(entry.name):
                remove_tree(entry)

    def size(self, name: str) -> int:
        """Return the bytes of a checkpoint, as far as it is written."""
        with suppress(OSError):
            return sum(file.stat().st_size for file in (self.folder / name).iterdir())
        return 0


def steps_in(place: Place, uid: str = "") -> StepFolders | ObjectSteps:
    """Return the checkpoints in a folder or below a prefix of an object store. uid: of the job that writes there."""
    return ObjectSteps(place, uid) if isinstance(place, ObjectPath) else StepFolders(place)


def report_of(step: int, path: Place) -> CheckpointReport:
    """Return the report of a complete checkpoint, even if it has been deleted in the meantime."""
    try:
        written = datetime.fromtimestamp((path / METADATA_FILE).stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        written = datetime.now(UTC)
    return CheckpointReport(step=step, path=str(path), time=written.strftime("%Y-%m-%dT%H:%M:%SZ"))


def newest_seen(folder: Path) -> CheckpointReport | None:
    """Return the last complete checkpoint on the volume, for a process that writes none; None where there is none."""
    with suppress(OSError):
        if complete := StepFolders(folder).look().complete:
            return report_of(complete[-1].step, folder / complete[-1].name)
    return None


def require_shared(folder: Place, world: World, within: float = SHARED_WITHIN_SECONDS) -> None:
    """Make `folder`; every rank must see what rank 0 writes there.

    Raises StorageNotShared on every rank, naming those that do not; InvalidConfiguration where rank 0 cannot write, or
    where no report could name what is written.
    """
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise InvalidConfiguration(
            f"`storage`: {folder} is no text in UTF-8, in which reports name checkpoints: use a folder of another name"
        ) from error
    nonce = world.from_first(lambda: _write_nonce(folder), str)
    probe = folder / nonce
    blind = [rank for rank, seen in enumerate(world.gather(_appears(probe, within), bool)) if not seen]
    if world.first:
        probe.unlink(missing_ok=True)
    if blind:
        raise StorageNotShared(
            f"ranks {', '.join(map(str, blind))} do not see a file that rank 0 wrote to {folder} within {within:g} s: "
            "`storage` must be one volume, or one object store, that all pods share"
        )


def _write_nonce(folder: Place) -> str:
    name = f".shared-{token_hex(8)}"
    try:
        with full_is_an_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    except OSError as error:
        why = f"{error.strerror or error}{_permission_advice(error)}"
        raise InvalidConfiguration(f"`storage`: rank 0 cannot write to {folder}: {why}") from error
    return name


def _permission_advice(error: OSError) -> str:
    """Return as whom it was tried, and what to do, where the right to write is what is missing."""
    if error.errno not in (errno.EACCES, errno.EPERM):
        return ""
    return (
        f" to user {os.geteuid()} of group {os.getegid()}: let the volume be theirs (where its driver can, `fsGroup` in"
        " the template's `securityContext` sees to it), or name one that may write there by its `runAsUser`"
    )


@contextmanager
def full_is_an_error(folder: Place) -> Iterator[None]:
    """Raises StorageFull for an OSError that says so."""
    try:
        yield
    except OSError as error:
        if not no_room(error):
            raise
        raise StorageFull(
            f"no room in {folder}, not even for a small file; ask for a larger volume in `storage`"
        ) from error


def _appears(path: Place, within: float) -> bool:
    deadline = time.monotonic() + within
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_AGAIN_SECONDS)
    return True
