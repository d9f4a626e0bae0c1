"""torch's checkpoint reader for files that anybody may have written: none has code run or leads out of its folder."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from disttrain_trainer.checkpoint import plans as checkpoint_plans
from disttrain_trainer.checkpoint.metadata_file import metadata_of
from disttrain_trainer.checkpoint.metadata_parts import NotMetadata
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.checkpoint.step_writer import METADATA_FILE, object_file_system
from disttrain_trainer.runtime.errors import CheckpointBroken, TrainerError, one_line, peer_lost
from disttrain_trainer.runtime.files import ForeignFileError, open_regular, read_bounded
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.object_path import OPTIONS, ObjectPath
from disttrain_trainer.runtime.plain import load_plain

MAX_METADATA_BYTES = 2**30
"""Five million parts of tensors have about as much."""
_NAMED = re.compile(r"GLOBAL (\S+)")


class _RegularFiles(FileSystem):
    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IO[bytes]]:  # type: ignore[override]
        assert mode == "rb", "for reading only"
        try:
            opened = open_regular(Path(path))
        except ForeignFileError as error:
            raise CheckpointBroken(f"{path} cannot be read: {error.strerror}") from error
        with opened as stream:
            yield stream


class StepReader(FileSystemReader):
    """Reads a checkpoint; its metadata once."""

    def __init__(self, place: Place) -> None:
        super().__init__(str(place))
        if isinstance(place, ObjectPath):
            # torch says FileSystem, and asks for no more than its base class.
            self.fs = object_file_system()  # type: ignore[assignment]
            self.path = self.fs.init_path(str(place), **OPTIONS)
        else:
            self.fs = _RegularFiles()
        self.place = place
        self._metadata: Metadata | None = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what stands where. Raises CheckpointBroken naming the file and what was found in it."""
        if self._metadata is None:
            self._metadata = read_metadata(self.place)
        return self._metadata


class _PlainPlanner(DefaultLoadPlanner):
    """Loads tensors, and of all else plain values only."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raises CheckpointBroken for a value that would have code run."""
        name = read_item.dest_index.fqn
        try:
            plain = load_plain(value)
        except pickle.UnpicklingError as error:
            # torch's own text advises to read it all the same.
            named = _NAMED.search(str(error))
            found = f"`{named[1]:.200}`" if named else "something else"
            raise CheckpointBroken(
                f"{self._place}: `{name}` holds {found}, expected plain values and tensors; nothing of it was run"
            ) from error
        set_element(self.original_state_dict, self.mappings[name], plain)


def read_metadata(place: Place) -> Metadata:
    """Return what stands where in a checkpoint.

    Raises CheckpointBroken naming the file and what was found in it; OSError where the storage fails.
    """
    path = place / METADATA_FILE
    try:
        return metadata_of(read_bounded(path, MAX_METADATA_BYTES))
    except (ForeignFileError, FileNotFoundError) as error:
        raise CheckpointBroken(f"{path} cannot be read: {error.strerror}") from error
    except NotMetadata as error:
        raise CheckpointBroken(f"{path} is no metadata of a checkpoint: it holds {error}") from error


def load(contents: dict[str, Any], reader: StorageReader, place: Place, world: World | None = None) -> None:
    """Load into `contents` what the checkpoint at `place` has of it. Called by all ranks of the world together.

    Raises CheckpointBroken for content that cannot be loaded.
    """
    try:
        checkpoint_plans.load(contents, reader, _PlainPlanner(place), world)
    except CheckpointException as failure:
        causes = [cause for cause, _ in failure.failures.values()]
        # A storage that fails may be well again at the next start; content stays what it is.
        if not causes or peer_lost(failure) or any(isinstance(cause, OSError) for cause in causes):
            raise
        own = next((cause for cause in causes if isinstance(cause, TrainerError)), None)
        if own is not None:
            raise own from failure
        message = f"{type(causes[0]).__name__}: {one_line(causes[0])}"
        raise CheckpointBroken(f"{place} cannot be loaded: {message}") from failure
