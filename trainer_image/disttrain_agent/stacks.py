"""A rank that is asked for its stacks, by a signal, writes that of its main thread into a file.

For those of its other threads and for its last collective calls it is asked apart: they take Python, which may not run.
Without Python's lock, a look at a thread that runs reads what that is just giving back, and ends the process.
"""

import faulthandler
import sys
from contextlib import suppress
from pathlib import Path

from disttrain_agent.collectives import answer_for_collectives
from disttrain_api.names import STACKS_SIGNAL


def answer_for_stacks(rank: int, folder: Path | None) -> None:
    """Write the stacks to `rank-<rank>.stacks` in the report folder when STACKS_SIGNAL comes.

    The file is there from the moment when the signal does no harm. The handler is C code: it also answers while Python
    waits in a collective call.
    """
    if folder is None or sys.platform != "linux":
        return
    # A rank without a place for them trains all the same.
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        # First: a signal that comes while the main thread starts another one may be that one's to answer.
        with suppress(OSError):
            answer_for_collectives(rank, folder)
        part = folder / f".rank-{rank}.stacks.part"
        # faulthandler writes to the descriptor for as long as the process lives.
        file = part.open("ab", buffering=0)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False)
        part.rename(folder / f"rank-{rank}.stacks")
        _kept.append(file)


_kept: list[object] = []
"""Files that nothing else holds open."""
