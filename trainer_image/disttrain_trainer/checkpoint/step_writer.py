"""torch's checkpoint writer, with a manifest of what was written, and the true cause where a file system is full."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from disttrain_trainer.checkpoint.step_manifest import FileDigest, Place, StepManifest, digest_of, write_manifest
from disttrain_trainer.runtime.errors import no_room
from disttrain_trainer.runtime.object_path import OPTIONS, ObjectPath

METADATA_FILE = ".metadata"
"""torch's own list of what stands where."""
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Written(WriteResult):
    """Write result of an item for rank 0, with the digest of its file."""

    digest: FileDigest


class StepWriter(FileSystemWriter):
    """Writes a rank's file of a checkpoint; on rank 0 also what describes all of them."""

    def __init__(self, folder: Place, manifest: StepManifest) -> None:
        """`manifest`: what is known before anything is written."""
        # Where there is no file to sync, torch would sync the whole machine.
        super().__init__(str(folder), sync_files=not isinstance(folder, ObjectPath))
        if isinstance(folder, ObjectPath):
            # torch says FileSystem, and asks for no more than its base class.
            self.fs = object_file_system()  # type: ignore[assignment]
            self.path = self.fs.init_path(str(folder), **OPTIONS)
        self._folder = folder
        self._manifest = manifest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write as torch does. Raises OSError with the file system's errno if that was the cause.

        torch.save turns a failed write into a RuntimeError about positions in its archive; the errno is lost, and with
        it what to tell the user.
        """
        try:
            results = super().write_data(plan, planner).wait()
        except Exception as error:
            refusal = refusal_of(self._folder) if isinstance(self._folder, Path) else None
            if refusal is None:
                raise
            raise refusal from error
        files = {result.storage_data.relative_path for result in results}
        digests = {file: digest_of(self._folder / file) for file in files}
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                Written(one.index, one.size_in_bytes, one.storage_data, digests[one.storage_data.relative_path])
                for one in results
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after all ranks have written: torch's metadata, then the manifest."""
        super().finish(metadata, results)
        files = {one.storage_data.relative_path: one.digest for rank in results for one in rank}  # type: ignore[attr-defined]
        files[METADATA_FILE] = digest_of(self._folder / METADATA_FILE)
        time = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        write_manifest(self._folder, self._manifest.model_copy(update={"files": files, "time": time}))


def object_file_system() -> FileSystemBase:
    """torch's view of fsspec."""
    from torch.distributed.checkpoint._fsspec_filesystem import FileSystem  # needs fsspec

    return FileSystem()


def refusal_of(folder: Path) -> OSError | None:
    """The error with which the file system refuses to let the largest file of a spoilt folder grow; None if it can."""
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size, default=folder / "probe")
    try:
        with largest.open("ab", buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            # A raw write may come back short, with what is wrong known to the next one only.
            file.write(b"0")
    except OSError as error:
        return error if no_room(error) else None
    return None
