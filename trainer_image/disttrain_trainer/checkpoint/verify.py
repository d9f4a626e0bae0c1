"""Which checkpoint to start from: the latest whose every byte is as it was written."""

import math
from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from disttrain_trainer.checkpoint.object_steps import ObjectSteps
from disttrain_trainer.checkpoint.step_manifest import Place, Step, StepManifest, flaws, read_manifest, unreadable
from disttrain_trainer.checkpoint.step_reader import read_metadata
from disttrain_trainer.checkpoint.step_writer import METADATA_FILE
from disttrain_trainer.checkpoint.storage import StepFolders
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import CheckpointBroken, shown
from disttrain_trainer.runtime.files import size_of
from disttrain_trainer.runtime.mesh import World


def latest_sound(folders: StepFolders | ObjectSteps, world: World, before: int | None = None) -> Step | None:
    """Return the latest sound checkpoint, None where there is no checkpoint. Called by all ranks together. before: only
    those of earlier steps count.

    Each file is read by one rank, so that a large checkpoint is verified in parallel. Damaged checkpoints after the
    sound one are set aside, with a line of the log each. Raises CheckpointBroken where all are damaged, and touches
    none of them then: to begin again at step 0 is a decision for a person.
    """
    damaged: list[tuple[Step, str]] = []
    complete = world.from_first(lambda: folders.look().complete, list[Step])
    for found in reversed([one for one in complete if before is None or one.step < before]):
        flaw = flaw_of(folders.folder / found.name, world, found.step)
        if flaw is None:
            for later, why in damaged:
                aside = world.from_first(lambda later=later: folders.set_aside(later.name), str)  # type: ignore[misc]
                log_first_rank(world, f"the checkpoint of step {later.step} is damaged: {why}; it is now {aside}")
            return found
        damaged.append((found, flaw))
    if damaged:
        flaws = "; ".join(f"step {one.step}: {flaw}" for one, flaw in damaged)
        raise CheckpointBroken(
            f"no checkpoint in {folders.folder} is as it was written ({flaws}); bring one back from a backup, or "
            "remove them to begin at step 0"
        )
    return None


def flaw_of(path: Place, world: World, step: int | None = None) -> str | None:
    """The first thing that is wrong with a checkpoint. Called by all ranks together.

    `step`: which its name says it is of.
    """
    manifest = world.from_first(lambda: _first_look(path), StepManifest | str | None)
    if isinstance(manifest, StepManifest):
        if step not in (None, manifest.step):
            return f"{path} is of step {manifest.step}, as its manifest says"
        share = sorted(manifest.files)[world.rank :: world.size]
        return next((flaw for found in world.gather(flaws(path, manifest, share), list[str]) for flaw in found), None)
    if manifest is None:
        log_first_rank(world, f"{path} has no manifest (an earlier version wrote it): it is loaded without a check")
    return manifest


def lone_flaw_of(path: Place) -> str | None:
    """Return the first thing that is wrong with a checkpoint, found by one process."""
    manifest = _first_look(path)
    if isinstance(manifest, StepManifest):
        return next(iter(flaws(path, manifest, manifest.files)), None)
    return manifest


def _first_look(path: Place) -> StepManifest | str | None:
    """Return the manifest, None where there is none, or a flaw in it or in what torch's metadata say."""
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return manifest
    try:
        metadata = read_metadata(path)
        sizes = {name: digest.size for name, digest in manifest.files.items()} if manifest else _sizes(path, metadata)
    except CheckpointBroken as error:
        return str(error)
    return metadata_flaw(metadata, sizes, path) or manifest


def _sizes(path: Place, metadata: Metadata) -> dict[str, int]:
    """Return the size of each file that the metadata name, of those that are there.

    Raises CheckpointBroken for what is no file that a rank has written.
    """
    found = {}
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        try:
            with suppress(FileNotFoundError):
                found[name] = size_of(path / name)
        except OSError as error:
            raise CheckpointBroken(unreadable(path / name, error)) from error
    return found


def metadata_flaw(metadata: Metadata, sizes: Mapping[str, int], path: Place) -> str | None:
    """Return what the metadata claim to be in files of these sizes and cannot be there; None for nothing.

    So that memory is asked for as much as the files have, whatever the metadata say; files.open_regular sees to it that
    the disk holds them.
    """
    stored: dict[str, int] = defaultdict(int)
    for index, info in metadata.storage_data.items():
        if info.offset + info.length > sizes.get(info.relative_path, -1):
            file = shown(info.relative_path)
            return f"{path / METADATA_FILE} looks for `{shown(index.fqn)}` where {file} has no such bytes"
        stored[index.fqn] += info.length
    if sum(stored.values()) > sum(sizes.values()):
        return f"{path / METADATA_FILE} finds more bytes in the files than they have"
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            needed = math.prod(entry.size) * entry.properties.dtype.itemsize
            if needed > stored[name]:
                return f"{path / METADATA_FILE} says that `{shown(name)}` has {needed} bytes, {stored[name]} are stored"
    return None
