"""How figures look, and how they become SVG that is the same wherever it is drawn."""

import io
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Rectangle

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#4477aa", "#ee8866", "#228833", "#bb4455", "#aa77bb", "#bbbbbb"
"""Colours that differ for the colour-blind, too (after Paul Tol's bright scheme)."""
LIGHT = {BLUE: "#c6d8ea", ORANGE: "#fbdccf", GREEN: "#c3e3c8", RED: "#f0cdd2", PURPLE: "#e6d8eb", GREY: "#eeeeee"}
INK = "#222222"

_SETTINGS: Any = {"svg.hashsalt": "disttrain", "font.size": 9, "font.family": "DejaVu Sans", "text.color": INK}
Point = tuple[float, float]


def sheet(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """Return a figure of this size in inches, and its axes in reading order, bare and with equal units."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for one in axes:
        one.set_axis_off()
        one.set_aspect("equal")
    return figure, axes


def svg(figure: Figure) -> str:
    """Return the figure as SVG without anything of the day or the machine in it."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def settings() -> Any:
    """Return a context in which figures are drawn."""
    return matplotlib.rc_context(_SETTINGS)


def box(axes: Axes, at: Point, size: Point, colour: str, text: str = "", **more: Any) -> None:
    """Draw a rectangle with its lower left corner `at`, and a text in its middle."""
    axes.add_patch(Rectangle(at, *size, facecolor=LIGHT.get(colour, colour), edgecolor=INK, linewidth=0.7))
    if text:
        axes.text(at[0] + size[0] / 2, at[1] + size[1] / 2, text, ha="center", va="center", **({"fontsize": 8} | more))


def frame(axes: Axes, at: Point, size: Point, text: str) -> None:
    """Draw a rounded frame around things, with a text above it."""
    shape = FancyBboxPatch(at, *size, boxstyle="round,pad=0.05", facecolor="none", edgecolor="#888888", linestyle="--")
    axes.add_patch(shape)
    axes.text(at[0] + size[0] / 2, at[1] + size[1] + 0.12, text, ha="center", va="bottom", fontsize=8)


def disc(axes: Axes, at: Point, colour: str, text: str, radius: float = 0.26) -> None:
    """Draw a rank: a disc with a text in it."""
    axes.add_patch(Circle(at, radius, facecolor=LIGHT[colour], edgecolor=INK, linewidth=0.8, zorder=3))
    axes.text(*at, text, ha="center", va="center", fontsize=8, zorder=4)


def arrow(
    axes: Axes, start: Point, end: Point, colour: str = INK, bend: float = 0.0, gap: float = 15, **more: Any
) -> None:
    """Draw an arrow between the middles of two discs; `gap` is what it leaves free at either end, in points."""
    options: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 10, "linewidth": 1.3} | more
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(start, end, color=colour, shrinkA=gap, shrinkB=gap, connectionstyle=style, **options)
    )


def limits(axes: Axes, left: float, right: float, bottom: float, top: float) -> None:
    """Say which part of the plane is seen."""
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
