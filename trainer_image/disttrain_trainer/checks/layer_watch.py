"""A rank that waits for a layer that another rank does not gather finds out, and says so, before its time is over.

Ranks that gather unlike numbers of layers wait for each other until the collective times out, and each then blames the
other's loss. A thread of each rank that has called no layer for a while compares what it has called (layer_order.py)
with what rank 0 has, through the store. Other ranks that are only slow have called the same, if less of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import TypeAdapter, ValidationError

from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.parallel.layer_order import LayerOrder, Notes, difference
from disttrain_trainer.runtime.errors import InvalidConfiguration, describe
from disttrain_trainer.runtime.mesh import World

PATIENCE_SECONDS = 10.0
"""A rank that calls no layer for so long compares."""
_LAST_SECONDS = 5.0
"""What the thread is given at the end: where rank 0's machine is gone, its store may not answer for long."""
_KEY = "disttrain/layers"
_NOTES = TypeAdapter(Notes)


@contextmanager
def watching_layers(order: LayerOrder | None, world: World, reporter: Reporter) -> Iterator[None]:
    """End this process with InvalidConfiguration where it waits inside for a layer that rank 0 does not gather.

    No Python code can end the wait itself. Raises InvalidConfiguration for an error that comes of it.
    """
    if order is None:
        yield
        return
    watch = _Watch(order, world)
    over, failed = threading.Event(), threading.Event()
    differences: list[str | None] = []

    def watch_on() -> None:
        while not over.wait(PATIENCE_SECONDS):
            if watch.stands_still() and (sentence := watch.compare()) is not None:
                _leave(InvalidConfiguration(sentence), reporter)
        if failed.is_set():
            differences.append(watch.compare())

    thread = threading.Thread(target=watch_on, name="layer-watch", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError as error:
        failed.set()
        over.set()
        thread.join(_LAST_SECONDS)
        if any(differences):
            raise InvalidConfiguration(str(differences[0])) from error
        raise
    finally:
        over.set()
        thread.join(_LAST_SECONDS)


class _Watch:
    def __init__(self, order: LayerOrder, world: World) -> None:
        self._order, self._world = order, world
        self._seen: Notes | None = None

    def stands_still(self) -> bool:
        """Whether nothing was noted since this was last asked."""
        before, self._seen = self._seen, self._order.notes
        return before == self._seen

    def compare(self) -> str | None:
        """Compare the calls of this rank with those of rank 0, and return a certain difference. Rank 0 publishes its
        own."""
        own, store = self._order.notes, self._world.store
        try:
            if self._world.first:
                store.set(_KEY, _NOTES.dump_json(own).decode())
                return None
            if not store.check([_KEY]):
                return None
            return difference(self._order, own, self._world.rank, _NOTES.validate_json(store.get(_KEY)))
        # The store is gone with rank 0, and nobody can be asked.
        except (RuntimeError, OSError, ValidationError):
            return None


def _leave(error: InvalidConfiguration, reporter: Reporter) -> None:
    failure = describe(error)
    # A report or a log that cannot be written must not keep the process.
    try:
        reporter.fail(failure)
        print(f"disttrain: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)
    finally:
        os._exit(failure.exit_code)
