"""The images under test, wherever the tests' cluster is: ours, one of kind, or another that can only pull."""

from __future__ import annotations

import os
from pathlib import Path

from tools.cluster import full, image_builds, node_images
from tools.cluster.build import Log
from tools.cluster.errors import ClusterError, MissingError
from tools.cluster.locks import exclusive
from tools.cluster.nodes import NODES
from tools.cluster.paths import IMAGE_TAG, REPOSITORY
from tools.cluster.shell import run

_NAMES_GIVEN = {"operator": "DISTTRAIN_OPERATOR_IMAGE", "trainer": "DISTTRAIN_TRAINER_IMAGE"}


def provide(log: Log) -> None:
    """Build the images and give them to the cluster's nodes; only build them where there is no cluster."""
    given = bool(os.environ.get("KUBECONFIG"))
    if given and all(os.environ.get(variable) for variable in _NAMES_GIVEN.values()):
        return
    own = _is_own_cluster()
    cluster = None if own else kind_cluster(_context())
    if cluster is not None:
        _provide_to_kind(cluster, log)
    elif own or not given:
        _provide_here(log)
    else:
        raise MissingError(
            "KUBECONFIG names a cluster that must pull its images: build and push the two Dockerfiles' images and name "
            f"them by {' and '.join(_NAMES_GIVEN.values())} (docs/installing.md has the commands)"
        )


def _is_own_cluster() -> bool:
    """Return whether the cluster is the one that `python -m tools.cluster up` starts."""
    named = os.environ.get("KUBECONFIG")
    return Path(named) == full.kubeconfig_path() if named else any(node.containerd.running() for node in NODES)


def _context() -> str:
    """Return the name of kubectl's current context; empty where there is none, or no kubectl."""
    try:
        return run(["kubectl", "config", "current-context"]).strip()
    except ClusterError:
        return ""


def _provide_here(log: Log) -> None:
    image_builds.build_all(log)
    if any(node.containerd.running() for node in NODES):
        log("loading the images into the nodes")
        with exclusive("images"):
            node_images.load(image_builds.IMAGES)


def references() -> dict[str, str]:
    """What the tests put into `image:`."""
    return {
        name: os.environ.get(variable) or f"disttrain/{name}:{IMAGE_TAG}" for name, variable in _NAMES_GIVEN.items()
    }


def _provide_to_kind(cluster: str, log: Log) -> None:
    for name, dockerfile in image_builds.DOCKERFILES.items():
        tag = f"disttrain/{name}:{IMAGE_TAG}"
        log(f"building {tag} with docker, for kind")
        what = ["--file", str(REPOSITORY / dockerfile), "--tag", tag, *image_builds.arguments(name)]
        run(["docker", "build", *what, REPOSITORY])
        run(["kind", "load", "docker-image", tag, "--name", cluster])


def kind_cluster(context: str) -> str | None:
    """kind calls its contexts `kind-NAME`."""
    return context.removeprefix("kind-") if context.startswith("kind-") else None
