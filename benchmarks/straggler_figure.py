"""The figure of straggler.py: python benchmarks/straggler_figure.py ROWS.json FIGURE.png"""

import json
import re
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_NAME = re.compile(r"(\w+): (.*)")
_PANELS = {
    "beside one 3 x slower": ("each of three beside one 3 times slower", "a worker alone"),
    "random delays, beside Sync": ("all four, random delays of equal mean", "Sync"),
}


def draw(rows: list[dict[str, object]], file: Path) -> None:
    """A panel for each kind of delay, a bar for each synchronization, a line for what it is compared with."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, (kind, (title, reference)) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        bars: dict[str, float] = {}
        compared = 0.0
        for row in rows:
            match = _NAME.fullmatch(str(row["name"]))
            if match and match[2] == kind:
                bars[match[1]], compared = float(str(row["value"])), float(str(row["reference"]))
        _panel(axes, bars, compared, reference)
        axes.set_title(title, fontsize=10)
    figure.savefig(file, dpi=110)


def _panel(axes: Axes, bars: dict[str, float], compared: float, reference: str) -> None:
    drawn = axes.bar(list(bars), list(bars.values()), width=0.55)
    axes.bar_label(
        drawn,
        [f"{value:.3g}, {value / compared:.2f} x" for value in bars.values()],
        padding=2,
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0},
        zorder=4,
    )
    axes.axhline(compared, color="black", linestyle="--", linewidth=1, label=f"{reference}: {compared:.3g}")
    axes.set(ylabel="tasks/s")
    axes.set_ylim(0, 1.3 * max([*bars.values(), compared]))
    axes.legend(loc="upper left", fontsize=8)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))
