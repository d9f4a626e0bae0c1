"""Builds the images from their Dockerfiles, with buildah, and keeps them as a layout of uncompressed layers.

Uncompressed, as compressing 5 GB takes minutes and the nodes would only undo it. A layer that the layout holds already
is not written again, so after a change of our code only the small layers at the end are.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tools.cluster import mounts, pip_access
from tools.cluster.build import Log
from tools.cluster.locks import exclusive
from tools.cluster.node_images import LAYOUT
from tools.cluster.paths import IMAGE_TAG, REPOSITORY, images_folder
from tools.cluster.shell import run, succeeds

DOCKERFILES = {"operator": "operator/Dockerfile", "trainer": "trainer_image/Dockerfile"}
IMAGES = tuple(DOCKERFILES)
_EXTRAS = {"trainer": "hf"}
"""What jobs of the tests need: examples/llama trains a model of transformers."""

_SUITE = "bookworm"
_PACKAGES = "python3,python3-venv,ca-certificates,usr-is-merged"
_MERGED_USR = "/usr/share/mmdebstrap/hooks/merged-usr"
_UNNEEDED = ("var/cache/apt/archives", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
BASE_IMAGE = f"localhost/disttrain/base:{_SUITE}-2"
"""The number is to be raised when what follows from the lines above changes."""


def build_all(log: Log) -> None:
    with exclusive("images"):
        # What an interrupted build has left: nobody else builds in this store, and we hold its lock.
        succeeds([*_buildah(), "rm", "--all"])
        _ensure_base(log)
        for name in IMAGES:
            log(f"building disttrain/{name}:{IMAGE_TAG}")
            _build(name)
        LAYOUT.prune()
        # Layers of former builds. The store is our own: nobody else's images are in it. What cannot be removed now
        # is removed after the next build.
        succeeds([*_buildah(), "rmi", "--prune"])


def _ensure_base(log: Log) -> None:
    """Debian with Python, made from packages: the stand-in for the base image that users take from a registry."""
    if succeeds([*_buildah(), "inspect", "--type", "image", BASE_IMAGE]):
        return
    log("building the base image")
    tree = images_folder() / "base.tree"
    mounts.unmount_below(tree)  # one that was killed leaves /proc in there
    shutil.rmtree(tree, ignore_errors=True)
    tree.parent.mkdir(parents=True, exist_ok=True)
    what = ["--variant=minbase", f"--hook-dir={_MERGED_USR}", f"--include={_PACKAGES}"]
    run(["mmdebstrap", *what, _SUITE, str(tree)], doing="mmdebstrap", log=images_folder() / "base.log")
    mounts.unmount_below(tree)
    _trim(tree)
    container = run([*_buildah(), "from", "scratch"]).strip()
    run([*_buildah(), "add", "--quiet", container, str(tree), "/"])
    run([*_buildah(), "commit", "--quiet", "--rm", container, BASE_IMAGE])
    shutil.rmtree(tree)


def _trim(tree: Path) -> None:
    for folder in _UNNEEDED:
        shutil.rmtree(tree / folder, ignore_errors=True)
    for mount_point in pip_access.MOUNT_POINTS:
        (tree / mount_point).mkdir(parents=True, exist_ok=True)


def _build(name: str) -> None:
    """Seconds, if no more than our code changed."""
    tag = f"localhost/disttrain/{name}:{IMAGE_TAG}"
    log = images_folder() / f"{name}.log"
    run(_build_command(name, tag), doing=f"building the {name}'s image", log=log)
    run(_store_command(name, tag), doing=f"storing the {name}'s image")


def _build_command(name: str, tag: str) -> Sequence[str]:
    volumes = [part for mount in pip_access.mounts() for part in ("--volume", mount)]
    options = ["--layers", "--pull-never", "--isolation", "chroot", "--network", "host"]
    what = ["--build-arg", f"BASE_IMAGE={BASE_IMAGE}", "--file", str(REPOSITORY / DOCKERFILES[name]), "--tag", tag]
    return [*_buildah(), "bud", *options, *volumes, *what, *arguments(name), str(REPOSITORY)]


def arguments(name: str) -> Sequence[str]:
    """What an image is built with beside its base."""
    return ("--build-arg", f"EXTRAS={_EXTRAS[name]}") if name in _EXTRAS else ()


def _store_command(name: str, tag: str) -> Sequence[str]:
    """By skopeo: buildah's own push compresses into a layout whatever one tells it, and never finds what is there."""
    root, runtime = _store()
    source = f"containers-storage:[overlay@{root}+{runtime}]{tag}"
    target = f"oci:{LAYOUT.folder}:{name}"
    return ["skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers", source, target]


def _buildah() -> Sequence[str]:
    root, runtime = _store()
    return ["buildah", "--root", str(root), "--runroot", str(runtime), "--storage-driver", "overlay"]


def _store() -> tuple[Path, Path]:
    """A store of our own: what we prune is nobody else's, and all of it lies in the cache."""
    return images_folder() / "store", images_folder() / "store-run"
