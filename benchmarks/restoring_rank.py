"""A rank that restores a checkpoint from several folders: `python -m benchmarks.restoring_rank REPEATS MEMORY`.

Rank 0 prints a line per repeat: seconds from the storage's files after the kernel has dropped them from its memory,
from the same files while it holds them, and from a copy of them in MEMORY, a folder of a file system in memory. The
slowest rank counts. In each the files are verified by their hashes, as at every start.
"""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.saving_rank import slowest, step
from disttrain_trainer.build import build_state
from disttrain_trainer.checkpoint.checkpoints import Checkpoints
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import join_world


def main() -> None:
    repeats, memory = int(sys.argv[1]), Path(sys.argv[2])
    config = read_config()
    device = find_device(config.local_rank, config.local_world_size, config.threads_given, 1)
    world = join_world(config, device)
    state = build_state(config, world)
    folder = config.checkpoint_folder
    assert isinstance(folder, Path)
    saving = Checkpoints.open(folder, config, world)
    step(state, world, 1)
    saving.save(state, wait=True)
    world.from_first(lambda: _copy(folder, memory), None)

    def restoring(place: Path) -> Callable[[], object]:
        opened = Checkpoints.open(place, config, world)
        return lambda: opened.restore(state)

    for number in range(1 + repeats):
        world.from_first(lambda: _forget(folder), None)
        seconds = [slowest(world, restoring(place)) for place in (folder, folder, memory)]
        # The first has what every process does once.
        if world.first and number:
            print(*seconds, flush=True)
    world.leave()
    sys.stdout.flush()
    os._exit(0)


def _copy(folder: Path, memory: Path) -> None:
    shutil.copytree(folder, memory, dirs_exist_ok=True)


def _forget(folder: Path) -> None:
    """Have the kernel drop the files from its memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
