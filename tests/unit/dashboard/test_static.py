"""The files of the page: small, complete, without a framework, and without a way from a text to markup."""

import gzip
import re
import subprocess
import tomllib

import pytest

from tools.cluster.paths import REPOSITORY

STATIC = REPOSITORY / "cli" / "disttrain_dashboard" / "static"
FILES = sorted(STATIC.iterdir())
MODULES = [file for file in FILES if file.suffix == ".js"]
MAX_COMPRESSED = 300_000
# What makes markup, or code, of a text.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|createContextualFragment|srcdoc|setHTML"
    r"|\beval\b|new Function|javascript:"
)


def test_all_of_it_is_small() -> None:
    assert len(gzip.compress(b"".join(file.read_bytes() for file in FILES))) < MAX_COMPRESSED


@pytest.mark.parametrize("module", MODULES, ids=lambda file: file.name)
def test_a_module_makes_no_markup_of_a_text_and_loads_its_neighbours_alone(module) -> None:
    text = module.read_text()
    assert FORBIDDEN.findall(text) == []
    assert "//" not in re.sub(r"^\s*//.*$|http://www\.w3\.org/2000/svg", "", text, flags=re.MULTILINE)
    imported = re.findall(r'from "\./([\w.]+)"', text)
    assert {name for name in imported if not (STATIC / name).is_file()} == set()
    assert len(imported) == len(re.findall(r"\bimport\b", text))


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = (STATIC / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=|https?:", page) == []
    named = re.findall(r'(?:src|href)="([\w.]+)"', page)
    assert {name for name in named if not (STATIC / name).is_file()} == set()


def test_every_file_is_in_the_wheel() -> None:
    """Hatch takes all of a package but what git ignores."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert "cli/disttrain_dashboard" in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ignored = subprocess.run(
        ["git", "check-ignore", *FILES], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (len(FILES) > 5, ignored.stdout) == (True, "")
