"""Builds the images from their Dockerfiles, with buildah, and keeps them as a layout of uncompressed layers.

Uncompressed, as compressing 5 GB takes minutes and the nodes would only undo it. A layer that the layout holds already
is not written again, so after a change of our code only the small layers at the end are.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.build import Say
from tests.cluster.node_images import LAYOUT
from tests.cluster.paths import REPOSITORY, cache_folder, images_folder
from tests.cluster.shell import run

DOCKERFILES = {"operator": "operator/Dockerfile", "trainer": "trainer_image/Dockerfile"}
IMAGES = tuple(DOCKERFILES)

_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates"
BASE_IMAGE = f"localhost/disttrain/base:{_SUITE}-1"
"""The number is to be raised when what follows from the two lines above changes."""

_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
_UNNEEDED = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
_PIP_CONFIG, _PIP_CACHE = "root/.config/pip", "root/.cache/pip"


def ensure_base(say: Say) -> None:
    """Debian with Python, made from packages: the stand-in for the base image that users take from a registry."""
    if run(["buildah", "images", "--format", "{{.Name}}:{{.Tag}}"]).find(BASE_IMAGE) >= 0:
        return
    tree = images_folder() / "base.tree"
    shutil.rmtree(tree, ignore_errors=True)
    say("building the base image")
    tree.parent.mkdir(parents=True, exist_ok=True)
    bootstrap = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, str(tree)]
    run(["nice", "-n", "10", *bootstrap], doing="debootstrap", log=images_folder() / "base.log")
    _trim(tree)
    container = run(["buildah", "from", "scratch"]).strip()
    run(["buildah", "add", "--quiet", container, tree, "/"])
    run(["buildah", "commit", "--quiet", "--rm", container, BASE_IMAGE])
    shutil.rmtree(tree)


def _trim(tree: Path) -> None:
    for folder in _UNNEEDED:
        shutil.rmtree(tree / folder, ignore_errors=True)
    for mount_point in (_PIP_CONFIG, _PIP_CACHE):  # of builds; made here, they are no part of what a build adds
        (tree / mount_point).mkdir(parents=True, exist_ok=True)


def ensure_image(name: str, say: Say) -> None:
    """Builds and stores one image; seconds if no more than our code changed."""
    say(f"building disttrain/{name}:test")
    log = images_folder() / f"{name}.log"
    tag = f"localhost/disttrain/{name}:test"
    run([*build_command(name, tag), str(REPOSITORY)], doing=f"building the {name}'s image", log=log)
    run(["nice", "-n", "10", *store_command(name, tag)], doing=f"storing the {name}'s image")
    LAYOUT.prune()


def build_command(name: str, tag: str) -> Sequence[str]:
    mounts = [f"{_pip_config()}:/{_PIP_CONFIG}:ro", f"{_pip_cache()}:/{_PIP_CACHE}"]
    return [
        *(
            "nice",
            "-n",
            "10",
            "buildah",
            "bud",
            "--layers",
            "--pull-never",
            "--isolation",
            "chroot",
            "--network",
            "host",
        ),
        *(part for mount in mounts for part in ("--volume", mount)),
        *("--build-arg", f"BASE_IMAGE={BASE_IMAGE}", "--file", str(REPOSITORY / DOCKERFILES[name]), "--tag", tag),
    ]


def store_command(name: str, tag: str) -> Sequence[str]:
    """By skopeo: buildah's own push compresses into a layout whatever one tells it, and never finds what is there."""
    uncompressed = "--dest-oci-accept-uncompressed-layers"
    return ["skopeo", "copy", "--quiet", uncompressed, f"containers-storage:{tag}", f"oci:{LAYOUT.folder}:{name}"]


# --- pip as this machine has it set up, during a build only ---


def _pip_cache() -> Path:
    folder = cache_folder() / "pip"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _pip_config() -> Path:
    """A folder with a pip.conf: the machine's settings, and its certificate authorities at a path that is inside."""
    folder = images_folder() / "pip-config"
    folder.mkdir(parents=True, exist_ok=True)
    settings = pip_settings(run([sys.executable, "-m", "pip", "config", "list"]))
    authorities = settings.get("cert") or _CERTIFICATES
    if Path(authorities).is_file():
        shutil.copyfile(authorities, folder / "authorities.pem")
        settings["cert"] = f"/{_PIP_CONFIG}/authorities.pem"
    lines = ["[global]", *(f"{key} = {value}" for key, value in settings.items())]
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")
    return folder


_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "cert", "timeout", "default-timeout")


def pip_settings(listed: str) -> dict[str, str]:
    """From what `pip config list` prints: how to reach packages. Folders of this machine mean nothing in a build."""
    settings = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        scope, _, name = key.partition(".")
        name = name.lstrip(".")
        if scope in ("global", ":env:") and name in _SETTINGS:
            settings[name.removeprefix("default-")] = value.strip("'\"")
    return settings
