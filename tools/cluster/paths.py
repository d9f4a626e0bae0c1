"""Where things lie: what is built stays in the cache, what runs lies in the state folder and goes with `down`."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parent
TOOL_MODULES = PACKAGE / "tools"
TEMPLATES = PACKAGE / "templates"
OPERATOR_PATH = os.pathsep.join(
    str(part) for part in (PACKAGE / "as_in_its_image", REPOSITORY / "api", REPOSITORY / "operator")
)
"""PYTHONPATH of an operator from the sources."""
IMAGE_TAG: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
"""The tag that the chart's values name, so that tests install the chart as users do."""


def cache_folder() -> Path:
    return _xdg("XDG_CACHE_HOME", ".cache") / "disttrain"


def for_one_run() -> bool:
    """Whether what is built serves one run, as on a CI that starts from nothing: it is then built quickly."""
    return bool(os.environ.get("CI"))


def binaries_folder() -> Path:
    return cache_folder() / ("bin-quick" if for_one_run() else "bin")


def images_folder() -> Path:
    return cache_folder() / "images"


def state_folder() -> Path:
    return _xdg("XDG_STATE_HOME", ".local/state") / "disttrain" / "cluster"


def _xdg(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default)
