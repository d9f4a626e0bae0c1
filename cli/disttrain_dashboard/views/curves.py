"""Curves of a job's figures over its steps: lines of metrics.jsonl, or points seen -> a bounded number of points. Pure.

A curve keeps one point for each equal range of steps. When it has too many, ranges become twice as long. So a run of
any length is its whole self, and a step that is done again after a restart replaces what it was before.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from disttrain_dashboard.views.bounded import name, number

Raw = Mapping[str, Any]
Panel = dict[str, Any]
"""title; lines: of each a name and points [step, value]; restarts: steps."""

MAX_POINTS = 500
MAX_CURVES = 16
MAX_RESTARTS = 50
_LOSS, _RATE = "Loss", "Samples per second"
_KNOWN = {
    "loss_metrics/global_avg_loss": (_LOSS, "training"),
    "validation_metrics/global_avg_loss": (_LOSS, "held-out"),
    "throughput(sps)": (_RATE, "samples/s"),
}
_OF_THE_TRAINER = {"attempt", "generation", "step", "grad_norm", "lr", "tflops"}
_OWN = ("task/", "validation_metrics/")


@dataclass
class Curve:
    """The points of one figure."""

    most: int = MAX_POINTS
    _range: int = 1
    _points: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, step: int, value: float) -> None:
        """Take a point; the last one of its range of steps counts."""
        self._points[step // self._range] = (step, value)
        while len(self._points) > self.most:
            self._range *= 2
            points = sorted(self._points.values())
            self._points = {at // self._range: (at, value) for at, value in points}

    @property
    def points(self) -> list[tuple[int, float]]:
        """Its points in the order of steps."""
        return sorted(self._points.values())


class Curves:
    """All curves of a job."""

    def __init__(self, most: int = MAX_POINTS) -> None:
        self._most = most
        self._curves: dict[tuple[str, str], Curve] = {}
        self._lives: dict[tuple[float, float], float] = {}

    def add(self, panel: str, title: str, step: Any, value: Any) -> None:
        """Take a point, if it is one and there are not too many curves."""
        at, height = number(step), number(value)
        if at is None or height is None or at < 0:
            return
        curve = self._curves.get((panel, title))
        if curve is None and len(self._curves) < MAX_CURVES:
            curve = self._curves[panel, title] = Curve(self._most)
        if curve is not None:
            curve.add(int(at), float(height))

    def add_progress(self, step: Any, loss: Any, rate: Any) -> None:
        """Take what a status says."""
        self.add(_LOSS, "training", step, loss)
        self.add(_RATE, "samples/s", step, rate)

    def add_lines(self, lines: Iterable[Any]) -> None:
        """Take lines of metrics.jsonl; what is none is passed over."""
        for line in lines:
            step = number(line.get("step")) if isinstance(line, Mapping) else None
            if step is None:
                continue
            life = (number(line.get("attempt")) or 1, number(line.get("generation")) or 0)
            if len(self._lives) <= MAX_RESTARTS:
                self._lives.setdefault(life, step)
            for key, value in line.items():
                if (place := place_of(key)) is not None:
                    self.add(*place, step, value)

    def panels(self) -> list[Panel]:
        """Return the curves by panel, loss and throughput first."""
        restarts = [self._lives[life] for life in sorted(self._lives)[1:]]
        by_panel: dict[str, list[dict[str, Any]]] = {}
        for (panel, title), curve in self._curves.items():
            by_panel.setdefault(panel, []).append({"name": title, "points": curve.points})
        order = sorted(by_panel, key=lambda title: (title != _LOSS, title != _RATE))
        return [{"title": title, "lines": by_panel[title], "restarts": restarts} for title in order]


def place_of(key: Any) -> tuple[str, str] | None:
    """Return panel and title of a figure; None for what is not drawn."""
    if not isinstance(key, str):
        return None
    if key in _KNOWN:
        return _KNOWN[key]
    if key.startswith(_OWN):
        title = name(key.removeprefix("task/").replace("validation_metrics/", "held-out "))
    elif key.isidentifier() and key not in _OF_THE_TRAINER:
        title = name(key)
    else:
        return None
    return title, title
