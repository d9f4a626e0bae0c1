"""tools/mutants.py: what it breaks, and what it leaves alone."""

from pathlib import Path

import pytest

from tools import mutants


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)

    def of(source: str) -> list[mutants.Mutant]:
        (tmp_path / "it.py").write_text(source)
        return list(mutants.mutants(Path("it.py")))

    return of


@pytest.mark.parametrize(
    ("source", "broken"),
    [
        ("x = a < b\n", ["x = (a <= b)\n"]),
        ("x = a and b\n", ["x = (a or b)\n"]),
        ("x = not a\n", ["x = (a)\n"]),
        ("x = a + b\n", ["x = (a - b)\n"]),
        ("x = True\n", ["x = (False)\n"]),
        ("x = 7\n", ["x = (8)\n"]),
        ("x = a if b else c\n", ["x = (a)\n", "x = (c)\n"]),
        ("x = [a for a in b if c]\n", ["x = [a for a in b if True]\n"]),
        ("if a:\n    b.c()\n", ["if False:\n    b.c()\n", "if True:\n    b.c()\n", "if a:\n    pass\n"]),
        ("def f():\n    return a\n", ["def f():\n    return None\n"]),
        # The lines below keep their numbers.
        ("f(\n    a,\n)\nb = c\n", ["pass\n\n\nb = c\n"]),
        ("é = 'é'; x = 7\n", ["é = 'é'; x = (8)\n"]),
    ],
)
def test_a_place_is_broken_in_these_ways(changes, source: str, broken: list[str]) -> None:
    assert [mutant.applied().decode() for mutant in changes(source)] == broken
