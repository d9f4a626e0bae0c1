"""Draw figures into docs/figures: `python -m tools.figures [NAME…]`; after `--png FOLDER` as PNG, to look at."""

import sys
from pathlib import Path

from tools.figures.all import FIGURES, FOLDER, draw
from tools.figures.style import settings, svg


def main(arguments: list[str]) -> None:
    """Draw the figures of these names, or all."""
    folder = Path(arguments[1]) if arguments[:1] == ["--png"] else None
    for name in arguments[2 if folder else 0 :] or FIGURES:
        with settings():
            if folder:
                draw(name).savefig(folder / f"{name}.png", dpi=110)
            else:
                (FOLDER / f"{name}.svg").write_text(svg(draw(name)))


main(sys.argv[1:])
