"""The figures of the documentation: each committed picture is what its code draws today."""

import re

import pytest

from tools.figures.all import FIGURES, FOLDER, draw
from tools.figures.style import settings, svg

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_NAME = re.compile(r"(?<=[#\"])[a-z][0-9a-f]{10}(?=[\")])")
"""Names of markers and clipping paths, which are hashes of their coordinates."""


def parts(picture: str) -> tuple[list[str], list[float]]:
    """Return what an SVG file says between its numbers, and the numbers."""
    plain = _NAME.sub("", picture)
    return _NUMBER.split(plain), [float(number) for number in _NUMBER.findall(plain)]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_what_its_code_draws(name: str) -> None:
    """Up to a pixel here and there: another processor rounds otherwise."""
    with settings():
        text, numbers = parts(svg(draw(name)))
    committed_words, committed_numbers = parts((FOLDER / f"{name}.svg").read_text())
    assert text == committed_words, "run `make figures`, and look at what has changed"
    assert numbers == pytest.approx(committed_numbers, abs=0.5)


def test_no_figure_is_left_of_code_that_is_gone() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(FIGURES)
