"""pip as this machine has it set up, for the length of a build: nothing of it stays in the image or in a Dockerfile."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cluster.errors import ClusterError
from tools.cluster.paths import cache_folder, images_folder
from tools.cluster.shell import run

_CONFIG, _CACHE = "root/.config/pip", "root/.cache/pip"
MOUNT_POINTS = (_CONFIG, _CACHE)
"""Folders that the base image must have, or each build would add them."""

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert", "timeout", "default-timeout")


def mounts() -> Sequence[str]:
    """HOST:INSIDE:OPTIONS for each folder that a build needs mounted."""
    return [f"{_configured()}:/{_CONFIG}:ro", f"{_cache()}:/{_CACHE}"]


def settings(listed: str) -> dict[str, str]:
    """From what `pip config list` prints: how to reach packages. Folders of this machine mean nothing in a build."""
    found = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        scope, _, name = key.partition(".")
        name = name.lstrip(".")
        if scope in ("global", ":env:") and name in _SETTINGS:
            found[name.removeprefix("default-")] = value.strip("'\"")
    return found


def _configured() -> Path:
    """A folder with a pip.conf and, beside it, the certificate authorities that it names."""
    folder = images_folder() / "pip-config"
    folder.mkdir(parents=True, exist_ok=True)
    values = settings(_listed())
    authorities = Path(values.get("cert") or _AUTHORITIES)
    if authorities.is_file():
        shutil.copyfile(authorities, folder / "authorities.pem")
        values["cert"] = f"/{_CONFIG}/authorities.pem"
    lines = ["[global]", *(f"{key} = {value}" for key, value in values.items())]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return folder


def _listed() -> str:
    try:
        return run([sys.executable, "-m", "pip", "config", "list"])
    except ClusterError:  # a Python without pip: nobody has set it up
        return ""


def _cache() -> Path:
    folder = cache_folder() / "pip"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
