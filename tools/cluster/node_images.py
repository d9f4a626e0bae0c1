"""Brings images from the layout into the nodes' containerds, each layer at most once.

An uncompressed layer is linked, not copied, into a containerd's store of content: containerd, told to pull, finds it
there, takes note of it and only unpacks it. Where a link is impossible it pulls the layer from our little registry.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tools.cluster.build import path_of
from tools.cluster.nodes import NODES, Node, image_reference
from tools.cluster.oci import Layout
from tools.cluster.paths import IMAGE_TAG, images_folder
from tools.cluster.registry import served
from tools.cluster.shell import run

LAYOUT = Layout(images_folder() / "layout")
_CONTENT = Path("containerd/io.containerd.content.v1.content/blobs/sha256")


def load(names: Sequence[str], nodes: Sequence[Node] = NODES) -> None:
    with served(LAYOUT) as registry, ThreadPoolExecutor() as pool:
        list(pool.map(lambda node: _load_all(names, node, registry), nodes))


def loaded(name: str, node: Node) -> bool:
    """Whether the node has exactly this build of the image."""
    entry = LAYOUT.manifest_of(name)
    listed = run([*_ctr(node), "images", "list", f"name=={image_reference(name)}"])
    return entry is not None and entry["digest"] in listed


def write_pause_image() -> None:
    """Every pod needs a process that holds its namespaces; ours is a few lines in an otherwise empty image."""
    if LAYOUT.manifest_of("pause"):
        return
    LAYOUT.folder.mkdir(parents=True, exist_ok=True)
    layer = LAYOUT.folder / "pause.tar"
    with tarfile.open(layer, "w") as tar:
        tar.add(path_of("pause"), arcname="pause")
    LAYOUT.write("pause", layer, {"Entrypoint": ["/pause"], "User": "65535:65535"})


def _load_all(names: Sequence[str], node: Node, registry: str) -> None:
    for name in names:
        _load_one(name, node, registry)


def _load_one(name: str, node: Node, registry: str) -> None:
    if loaded(name, node):
        return
    _link_content(name, node)
    pulled = f"{registry}/disttrain/{name}:{IMAGE_TAG}"
    ctr = [*_ctr(node), "images"]
    run([*ctr, "pull", "--plain-http", pulled], doing=f"loading disttrain/{name} into {node.name}")
    run([*ctr, "tag", "--force", pulled, image_reference(name)])
    run([*ctr, "remove", pulled])


def _link_content(name: str, node: Node) -> None:
    store = node.folder / _CONTENT
    store.mkdir(parents=True, exist_ok=True)
    for digest in LAYOUT.blobs_of(name):
        blob = LAYOUT.blob(digest)
        with suppress(OSError):  # there already, or on another file system: then it is pulled
            os.link(blob, store / blob.name)


def _ctr(node: Node) -> list[str]:
    return ["ctr", "--address", str(node.socket), "--namespace", "k8s.io"]
