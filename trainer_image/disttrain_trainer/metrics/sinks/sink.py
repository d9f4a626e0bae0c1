"""Interface of a sink for figures and texts, and the sink that never blocks training."""

import queue
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from disttrain_trainer.runtime.errors import one_line

Values = dict[str, Any]
"""A line of metrics.jsonl: the `step`, numbers, and None where a number is not finite."""
Samples = Sequence[tuple[str, str]]
"""Prompts, each with the text that the model has written after it."""

CLOSING_SECONDS = 10.0
"""How long a rank that ends waits for what is not written yet; less than any grace period that is worth its name."""
_MOST_WAITING = 1000


class Sink(Protocol):
    """Takes figures and texts."""

    def write(self, values: Values) -> None:
        """Take a line."""

    def write_samples(self, step: int, samples: Samples) -> None:
        """Take the texts that were written after a step."""

    def close(self) -> None:
        """No more lines come."""


class Sinks:
    """Several as one."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._sinks = tuple(sinks)

    def write(self, values: Values) -> None:
        """To each of them."""
        for sink in self._sinks:
            sink.write(values)

    def write_samples(self, step: int, samples: Samples) -> None:
        """To each of them."""
        for sink in self._sinks:
            sink.write_samples(step, samples)

    def close(self) -> None:
        """Each of them."""
        for sink in self._sinks:
            sink.close()


class Background:
    """Writes to a service in a thread of its own: what it takes, or that it is away, is not the training's concern.

    While the service fails, the line in hand is lost and each new line tries again; a sentence on stderr says so once
    for each time that it goes away.
    """

    def __init__(self, name: str, connect: Callable[[], Sink]) -> None:
        self._name, self._connect = name, connect
        self._lines: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(_MOST_WAITING)
        self._sink: Sink | None = None
        self._away = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def write(self, values: Values) -> None:
        self._hand_over(lambda sink: sink.write(values))

    def write_samples(self, step: int, samples: Samples) -> None:
        self._hand_over(lambda sink: sink.write_samples(step, samples))

    def _hand_over(self, line: Callable[[Sink], None]) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._complain(f"{_MOST_WAITING} lines wait to be written")

    def close(self) -> None:
        """Wait until all is written, but no longer than CLOSING_SECONDS."""
        try:
            self._lines.put(None, timeout=CLOSING_SECONDS)
        except queue.Full:
            return
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            self._complain(f"it takes longer than {CLOSING_SECONDS:g} s to write the last lines")

    def _work(self) -> None:
        while (line := self._lines.get()) is not None:
            self._try(partial(self._write, line))
        if self._sink is not None:
            self._try(self._sink.close)

    def _write(self, line: Callable[[Sink], None]) -> None:
        if self._sink is None:
            self._sink = self._connect()
        line(self._sink)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._complain(one_line(error) if str(error) else type(error).__name__)
        else:
            self._away = False

    def _complain(self, why: str) -> None:
        if not self._away:
            print(f"disttrain: {self._name}: figures are lost: {why}", file=sys.stderr, flush=True)
        self._away = True
