"""A request for a checkpoint: the time of a file that the ranks of a pod look at after each step."""

import contextlib
import os
import time
from pathlib import Path


def checkpoint_request_file(reports: Path) -> Path:
    """Return the path of the file; ranks that would write a checkpoint make it. reports: folder of their reports."""
    return reports / "checkpoint-request"


def request_checkpoint(reports: Path) -> bool:
    """Ask the ranks for a checkpoint of the next step that they have done; False where none of them would write one."""
    path = checkpoint_request_file(reports)
    with contextlib.suppress(OSError):
        # They compare it with the last request that they have answered. A clock may be set back.
        asked = max(time.time_ns(), path.stat().st_mtime_ns + 1)
        os.utime(path, ns=(asked, asked))
        return True
    return False
