"""The bubble of a pipeline, from what its ranks have measured."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from disttrain_trainer.parallel.pipeline.simulate import Kind, Table, idle_part


class Measured(NamedTuple):
    """Figures of one rank since its last report."""

    seconds: float
    """The time that all passes through the pipeline took."""
    actions: Mapping[tuple[Kind, int], tuple[float, int]]
    """Seconds of each kind of computation in each stage, and how often it ran."""


Rows = tuple[float, list[tuple[Kind, int, float, int]]]
"""A Measured without keys that JSON cannot have: kind, stage, seconds and how often of each action."""


def rows_of(measured: Measured) -> Rows:
    """Return what one rank has measured in the form in which it goes to the others."""
    return measured.seconds, [(*key, *spent) for key, spent in measured.actions.items()]


def measured_of(rows: Rows) -> Measured:
    """Return the Measured of these rows."""
    return Measured(rows[0], {(kind, stage): (seconds, times) for kind, stage, seconds, times in rows[1]})


def bubbles_of(ranks: Sequence[Measured], table: Table) -> dict[str, float]:
    """Entries of metrics.jsonl, in percent: the idle part as measured, and what `table` gives for the mean times.

    Empty where no time has passed.
    """
    longest = max(rank.seconds for rank in ranks)
    if not longest:
        return {}
    busy = sum(spent for rank in ranks for spent, _ in rank.actions.values())
    means: dict[tuple[Kind, int], list[float]] = {}
    for rank in ranks:
        for key, (spent, times) in rank.actions.items():
            means.setdefault(key, []).append(spent / times)
    average = {key: sum(values) / len(values) for key, values in means.items()}
    return {
        "pipeline/bubble(%)": 100 * (1 - busy / (longest * len(ranks))),
        "pipeline/bubble_of_schedule(%)": 100 * idle_part(table, average),
    }
