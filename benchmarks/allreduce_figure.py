"""The figure of allreduce.py: python benchmarks/allreduce_figure.py ROWS.json FIGURE.png"""

import json
import re
import sys
from pathlib import Path

from matplotlib.figure import Figure

_NAME = re.compile(r"(\w+) of (\d+) ranks: (.*)")
_PANELS = {
    "hottest link": ("bytes over the hottest link / bytes summed", "ratio"),
    "time": ("milliseconds, all ranks on one machine", "value"),
}


def draw(rows: list[dict[str, object]], file: Path) -> None:
    """A panel for each kind of figure, a curve for each algorithm."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (kind, (label, key)) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        curves: dict[str, dict[int, float]] = {}
        for row in rows:
            match = _NAME.fullmatch(str(row["name"]))
            if match and match[3] == kind:
                curves.setdefault(match[1], {})[int(match[2])] = float(str(row[key]))
        for algorithm, values in curves.items():
            # Dashed and in front: of the backend's bytes only the formula is known, which is the ring's.
            style, front = ("--", 3) if algorithm == "Backend" else ("-", 2)
            axes.plot(list(values), list(values.values()), style, marker=".", label=algorithm, zorder=front)
        axes.set(xlabel="ranks", ylabel=label, xticks=sorted({ranks for values in curves.values() for ranks in values}))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))
