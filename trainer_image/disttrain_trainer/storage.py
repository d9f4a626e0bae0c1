"""The folder that holds a job's checkpoints: which are complete, which go, and whether all ranks see the same folder.

<folder>/fence.json          owner, see fence.py
<folder>/metrics.jsonl       one line per logged step
<folder>/step-20/            complete: it got this name by one rename after everything in it was written
<folder>/step-40.broken/     was complete, is damaged: not as its manifest says; goes when step 40 is reached again
<folder>/step-30.partial-2   being written by attempt 2, or left over
<folder>/step-10.deleting    on its way out, or left over
"""

import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from disttrain_api.report import CheckpointReport
from disttrain_trainer.errors import InvalidConfiguration, StorageFull, StorageNotShared, no_room
from disttrain_trainer.files import sync_folder
from disttrain_trainer.mesh import World
from disttrain_trainer.object_path import ObjectPath
from disttrain_trainer.object_steps import ObjectSteps
from disttrain_trainer.step_manifest import Place
from disttrain_trainer.step_writer import METADATA_FILE

_STEP = re.compile(r"step-(\d+)")
_LEFT_OVER = re.compile(r"step-\d+\.(partial-\d+|deleting)")
_BROKEN = re.compile(r"step-(\d+)\.broken")

SHARED_WITHIN_SECONDS = 15.0
"""How long a file of rank 0 may take to be seen by another rank."""
_LOOK_AGAIN_SECONDS = 0.1


@dataclass(frozen=True)
class StepFolders:
    """The `step-N` folders of a checkpoint folder. Only rank 0 changes anything."""

    folder: Path

    def complete(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        found = ((entry, _STEP.fullmatch(entry.name)) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for entry, match in found if match and (entry / METADATA_FILE).is_file())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def partial(self, step: int, attempt: int) -> Path:
        """Where the checkpoint is written before it is complete."""
        return self.folder / f"step-{step}.partial-{attempt}"

    def commit(self, partial: Path, step: int) -> Path:
        """Make a written checkpoint complete, in place of one of the same step."""
        path = self.path(step)
        if path.exists():
            self.remove(path)
        sync_folder(partial)
        partial.rename(path)
        sync_folder(self.folder)
        self._forget_broken(step)
        return path

    def set_aside(self, step: int) -> Path:
        """Give a damaged checkpoint another name: it counts no more, and a person can still look at it."""
        path = self.path(step)
        aside = path.with_name(f"{path.name}.broken")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        return aside

    def _forget_broken(self, step: int) -> None:
        """Delete the damaged checkpoints up to this step, which has been reached again."""
        for entry in self.folder.iterdir():
            match = _BROKEN.fullmatch(entry.name)
            if match and int(match[1]) <= step:
                shutil.rmtree(entry, ignore_errors=True)

    def keep(self, steps: set[int]) -> None:
        """Delete all complete checkpoints but those of `steps`."""
        for step in self.complete():
            if step not in steps:
                self.remove(self.path(step))

    def remove(self, path: Path) -> None:
        """Delete a checkpoint; renamed first, so that a half deleted one is never taken for complete."""
        doomed = path.with_name(f"{path.name}.deleting")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def discard(self, partial: Path) -> int:
        """Delete what was written of a checkpoint that failed; returns its bytes."""
        size = sum(file.stat().st_size for file in partial.glob("*")) if partial.is_dir() else 0
        shutil.rmtree(partial, ignore_errors=True)
        return size

    def clean(self) -> None:
        """Delete what earlier attempts left unfinished."""
        for entry in self.folder.iterdir():
            unfinished = _STEP.fullmatch(entry.name) and not (entry / METADATA_FILE).is_file()
            if unfinished or _LEFT_OVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def steps_in(place: Place, uid: str = "") -> StepFolders | ObjectSteps:
    """The checkpoints in a folder or below a prefix of an object store; `uid` of the job that writes there."""
    return ObjectSteps(place, uid) if isinstance(place, ObjectPath) else StepFolders(place)


def report_of(step: int, path: Place) -> CheckpointReport:
    """What is told of a complete checkpoint. Raises OSError where it is not there any more."""
    written = datetime.fromtimestamp((path / METADATA_FILE).stat().st_mtime, UTC)
    return CheckpointReport(step=step, path=str(path), time=written.strftime("%Y-%m-%dT%H:%M:%SZ"))


def newest_seen(folder: Path) -> CheckpointReport | None:
    """The last complete checkpoint, to who writes none but reads the volume; None where none is seen."""
    folders = StepFolders(folder)
    # Who writes them may delete one at the same time.
    with suppress(OSError):
        if steps := folders.complete():
            return report_of(steps[-1], folders.path(steps[-1]))
    return None


def require_shared(folder: Place, world: World, within: float = SHARED_WITHIN_SECONDS) -> None:
    """Make `folder`; every rank must see what rank 0 writes there.

    Raises StorageNotShared on every rank, naming those that do not; InvalidConfiguration where rank 0 cannot write.
    """
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
    name = f".shared-{secrets.token_hex(8)}"
    try:
        with full_is_an_error(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    except OSError as error:
        raise InvalidConfiguration(f"`storage`: rank 0 cannot write to {folder}: {error.strerror or error}") from error
    return name


@contextmanager
def full_is_an_error(folder: Place) -> Iterator[None]:
    """Raises StorageFull for an OSError that says so."""
    try:
        yield
    except OSError as error:
        if not no_room(error):
            raise
        raise StorageFull(f"no room in {folder}, not even for a small file; ask for a larger `storage.size`") from error


def _appears(path: Place, within: float) -> bool:
    deadline = time.monotonic() + within
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_AGAIN_SECONDS)
    return True
