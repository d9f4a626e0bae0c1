"""Cost of a pipeline without flush: idle time, versions of weights and their memory, measured and in theory."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from disttrain_trainer.parallel.pipedream.versions import Versions
from disttrain_trainer.runtime.device import Device, Mark

_MIB = 2**20


class RankFigures(NamedTuple):
    """Figures of one rank since its last report; numbers only, so that a sum over ranks can carry a row of each."""

    stage: float
    computed_seconds: float
    """The time that forward and backward passes and updates took."""
    elapsed_seconds: float
    microbatches: float
    """Backward passes."""
    versions: float
    """The most that were held at once."""
    bytes: float
    """The most memory that they took."""
    version_bytes: float
    """The memory that one version takes."""
    staleness: float
    """The most updates between the weights of a gradient and those that it changed."""
    loss: float
    """This replica's mean loss in the last step; 0 where the last stage is not."""


class Meter:
    """Measures a rank."""

    def __init__(self, device: Device, stage: int) -> None:
        self._device, self._stage = device, stage
        self._spans: list[tuple[Mark, Mark]] = []
        self._elapsed, self._since = 0.0, time.monotonic()
        self._microbatches = self._staleness = self._most = self._bytes = self._version_bytes = 0

    @contextmanager
    def flowing(self) -> Iterator[None]:
        """Time passes inside only."""
        self._since = time.monotonic()
        yield
        self._pass_time()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Inside, the device computes."""
        begin = self._device.mark()
        yield
        self._spans.append((begin, self._device.mark()))

    def passed(self, staleness: int) -> None:
        """A backward pass whose gradient is this many updates late."""
        self._microbatches += 1
        self._staleness = max(self._staleness, staleness)

    def holds(self, versions: Versions) -> None:
        """The rank now holds these."""
        if versions.count > self._most:
            self._most, self._bytes, self._version_bytes = versions.count, versions.bytes(), versions.bytes_of_newest()

    def take(self) -> dict[str, float]:
        """All of RankFigures but the loss, since this was last called."""
        self._device.synchronize()
        self._pass_time()
        taken = {
            "stage": self._stage,
            "computed_seconds": sum(self._device.seconds(begin, end) for begin, end in self._spans),
            "elapsed_seconds": self._elapsed,
            "microbatches": self._microbatches,
            "versions": self._most,
            "bytes": self._bytes,
            "version_bytes": self._version_bytes,
            "staleness": self._staleness,
        }
        self._spans.clear()
        self._elapsed, self._microbatches, self._staleness, self._most = 0.0, 0, 0, 0
        return taken

    def _pass_time(self) -> None:
        now = time.monotonic()
        self._elapsed += now - self._since
        self._since = now


def rows_of(numbers: Sequence[float]) -> list[RankFigures]:
    """The rows of all ranks, from their numbers one after the other."""
    width = len(RankFigures._fields)
    return [RankFigures(*numbers[at : at + width]) for at in range(0, len(numbers), width)]


def row_among(own: RankFigures, rank: int, ranks: int) -> list[float]:
    """The numbers of all ranks with zeros for the others: what this rank adds to their sum."""
    width = len(own)
    return [0.0] * (rank * width) + [*own] + [0.0] * ((ranks - rank - 1) * width)


def metrics_of(rows: Sequence[RankFigures], versions: Mapping[int, int]) -> dict[str, float]:
    """Entries of metrics.jsonl. versions: how many each stage holds in theory.

    The bubble that remains in theory is that of stages of unequal length, while the pipeline is full.
    """
    figures = {"loss_metrics/global_max_loss": max(row.loss for row in rows)}
    longest = max(row.elapsed_seconds for row in rows)
    paces = [row.computed_seconds / row.microbatches for row in rows if row.microbatches]
    if longest and paces and max(paces):
        busy = sum(row.computed_seconds for row in rows)
        figures["pipeline/bubble(%)"] = 100 * (1 - busy / (longest * len(rows)))
        figures["pipeline/bubble_of_schedule(%)"] = 100 * (1 - sum(paces) / len(paces) / max(paces))
    for stage, theory in versions.items():
        own = [row for row in rows if row.stage == stage]
        name = f"pipeline/stage_{stage}"
        figures |= {
            f"{name}/versions": max(row.versions for row in own),
            f"{name}/versions_of_theory": theory,
            f"{name}/weights(MiB)": max(row.bytes for row in own) / _MIB,
            f"{name}/weights_of_theory(MiB)": theory * max(row.version_bytes for row in own) / _MIB,
            f"{name}/staleness": max(row.staleness for row in own),
        }
    return figures
