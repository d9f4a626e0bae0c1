"""What a run's metrics.jsonl looks like: loss.png and throughput.png beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

METRICS_FILE = "metrics.jsonl"
_LOSSES = {"loss_metrics/global_avg_loss": "training", "validation_metrics/global_avg_loss": "held-out"}

Line = Mapping[str, Any]
Series = tuple[list[int], list[float]]


def draw(folder: Path) -> list[Path]:
    """The plots that were drawn; none where there is nothing to show. A line that a kill cut off is passed over."""
    lines = _read(folder / METRICS_FILE)
    losses = {label: series(lines, key) for key, label in _LOSSES.items()}
    rates = {key: series(lines, key) for line in lines for key in line if key.startswith("throughput(")}
    drawn = []
    for name, curves, label in (("loss", losses, "loss"), ("throughput", rates, "per second and rank")):
        filled = {title: curve for title, curve in curves.items() if curve[0]}
        if filled:
            drawn.append(_plot(folder / f"{name}.png", filled, label))
    return drawn


def series(lines: Sequence[Line], key: str) -> Series:
    """Steps and values of a figure; a step that was done again after a restart counts as its last attempt has it."""
    values = {line["step"]: float(line[key]) for line in lines if line.get(key) is not None}
    return sorted(values), [values[step] for step in sorted(values)]


def _read(file: Path) -> list[Line]:
    if not file.exists():
        return []
    lines = []
    for text in file.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue
    return lines


def _plot(file: Path, curves: Mapping[str, Series], label: str) -> Path:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for title, (steps, values) in curves.items():
        # One evaluation is a point, not a line.
        axes.plot(steps, values, label=title, marker="o" if len(steps) < 3 else None)
    axes.set(xlabel="step", ylabel=label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    return file
