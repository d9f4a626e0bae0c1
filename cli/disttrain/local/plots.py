"""Plots of a run's metrics.jsonl: loss.png, throughput.png and figures.png beside it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from disttrain.local.folder import METRICS_FILE

_LOSSES = {"loss_metrics/global_avg_loss": "training", "validation_metrics/global_avg_loss": "held-out"}
_RATES = {"throughput(sps)": "samples"}
_MOST_FIGURES = 12
_OF_THE_TRAINER = {"attempt", "generation", "step", "grad_norm", "lr", "tflops"}

Line = Mapping[str, Any]
Series = tuple[list[int], list[float]]


def draw(folder: Path) -> list[Path]:
    """Draw what there is, and return the plots' files. A line that a kill cut off is passed over."""
    lines = _read(folder / METRICS_FILE)
    restarts = restarted_at(lines)
    own = {key: key.removeprefix("task/").replace("validation_metrics/", "held-out ") for key in _own(lines)}
    plots = {
        "loss": {"loss": _LOSSES},
        "throughput": {"per second": _RATES},
        "figures": {label: {key: label} for key, label in list(own.items())[:_MOST_FIGURES]},
    }
    drawn = []
    for name, panels in plots.items():
        curves = {label: {title: series(lines, key) for key, title in keys.items()} for label, keys in panels.items()}
        filled = {label: {title: one for title, one in of.items() if one[0]} for label, of in curves.items()}
        filled = {label: of for label, of in filled.items() if of}
        if filled:
            drawn.append(_plot(folder / f"{name}.png", filled, restarts))
    return drawn


def restarted_at(lines: Sequence[Line]) -> list[int]:
    """Return the first step of each life of the ranks but the first, as far as lines tell: attempts, and within them
    restarts in place."""
    firsts: dict[tuple[int, int], int] = {}
    for line in lines:
        firsts.setdefault((line.get("attempt", 1), line.get("generation", 0)), line["step"])
    return [firsts[life] for life in sorted(firsts)[1:]]


def _own(lines: Sequence[Line]) -> list[str]:
    """Return the keys of a task's or a program's own figures, and of those on held-out data."""
    keys = dict.fromkeys(key for line in lines for key in line)
    groups = ("task/", "validation_metrics/")
    return [
        key
        for key in keys
        if key not in _LOSSES and (key.startswith(groups) or (key.isidentifier() and key not in _OF_THE_TRAINER))
    ]


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


def _plot(file: Path, panels: Mapping[str, Mapping[str, Series]], restarts: Sequence[int]) -> Path:
    """Draw a panel below the other for each label, and a dotted line where the job began anew."""
    figure = Figure(figsize=(7, 1 + 3 * len(panels)), layout="constrained")
    for axes, (label, curves) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True):
        for title, (steps, values) in curves.items():
            # One evaluation is a point, not a line.
            axes.plot(steps, values, label=title, marker="o" if len(steps) < 3 else None)
        for number, step in enumerate(restarts):
            axes.axvline(step, color="gray", linestyle=":", label=None if number else "restart")
        axes.set(xlabel="step", ylabel=label)
        if all(value >= 0 for _, values in curves.values() for value in values):
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=120)
    return file
