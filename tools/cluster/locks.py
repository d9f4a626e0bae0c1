"""One at a time, also across processes: a lock on a file, which the kernel releases whatever becomes of the holder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

from tools.cluster.paths import cache_folder


@contextmanager
def exclusive(name: str) -> Iterator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
