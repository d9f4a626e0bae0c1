"""`make lock`: writes the requirements of images and CI, each at one version and with the hashes of its files.

Versions are those of constraints.txt, what is needed is what pyproject.toml says. An index that hands out other files
under these names is then refused by pip. No file says which index the hashes came from.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHON = "3.11"
"""The oldest Python that the requirements are for. Markers distinguish newer ones and other platforms."""

_OF_TORCH = re.compile(r"(torch|triton|nvidia-|cuda-)")


def _of_torch(name: str) -> bool:
    """Return whether a package comes with torch alone: gigabytes, which are a layer of their own in the image."""
    return _OF_TORCH.match(name) is not None


def _others(name: str) -> bool:
    return not _of_torch(name)


def _all(name: str) -> bool:
    return True


# File -> (extras of pyproject.toml, further requirements, which of what they need is written).
FILES: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[str], bool]]] = {
    "operator/requirements.txt": (("operator",), (), _all),
    "trainer_image/requirements.txt": (("trainer",), (), _others),
    "trainer_image/requirements-torch.txt": (("trainer",), (), _of_torch),
    "trainer_image/requirements-pip.txt": ((), ("pip",), lambda name: name == "pip"),
    # What hatchling asks for when it installs a clone, whose folders stay where they are.
    "requirements-dev.txt": (("dev",), ("pip", "editables"), _all),
}
_HEAD = "# Written by `make lock` from pyproject.toml and constraints.txt.\n"


def requirements(project: dict[str, Any], extras: Sequence[str]) -> list[str]:
    """Return what the package, these extras of it and its build need; extras that name others are followed."""
    found = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    for extra in extras:
        for requirement in project["project"]["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['project']['name']}\[(.+)\]", requirement)
            found += requirements(project, own[1].split(",")) if own else [requirement]
    return list(dict.fromkeys(found))


def entries(text: str) -> Iterator[tuple[str, str]]:
    """Yield (name, lines) of each package of a requirements file."""
    for lines in re.findall(r"^[A-Za-z0-9].*\n(?:[ \t].*\n)*", text, re.MULTILINE):
        yield re.split(r"[=\[ ]", lines)[0], lines


def write(uv: str, project: dict[str, Any], file: str) -> None:
    """Write one of FILES."""
    extras, further, belongs = FILES[file]
    with tempfile.TemporaryDirectory() as folder:
        wanted, locked = Path(folder) / "wanted.in", Path(folder) / "locked.txt"
        wanted.write_text("\n".join([*requirements(project, extras), *further]) + "\n")
        options = ["--generate-hashes", "--universal", "--python-version", PYTHON, "--quiet"]
        silent = ["--no-header", "--no-annotate", "--no-emit-index-url", "--no-emit-find-links"]
        versions = ["--constraint", str(REPOSITORY / "constraints.txt"), "--output-file", str(locked)]
        subprocess.run([uv, "pip", "compile", str(wanted), *options, *silent, *versions], check=True)
        kept = [lines for name, lines in entries(locked.read_text()) if belongs(name)]
    (REPOSITORY / file).write_text(_HEAD + "".join(kept))


def main() -> int:
    """Write all of FILES."""
    uv = shutil.which("uv")
    if uv is None:
        print("make lock: uv is not installed: it finds out what is needed, with the hashes", file=sys.stderr)
        return 2
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    for file in FILES:
        write(uv, project, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
