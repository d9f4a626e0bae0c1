"""The images under test, wherever the tests' cluster is: ours, one of kind, or another that can only pull."""

from __future__ import annotations

import os

from tests.cluster import image_builds, node_images
from tests.cluster.build import Say
from tests.cluster.errors import MissingError
from tests.cluster.locks import exclusive
from tests.cluster.nodes import NODES
from tests.cluster.paths import REPOSITORY
from tests.cluster.shell import run

_NAMES_GIVEN = {"operator": "DISTTRAIN_OPERATOR_IMAGE", "trainer": "DISTTRAIN_TRAINER_IMAGE"}


def provide(say: Say) -> None:
    """To the nodes of the cluster that the tests use."""
    if os.environ.get("KUBECONFIG"):
        _provide_elsewhere(say)
        return
    image_builds.build_all(say)
    if any(node.containerd.running() for node in NODES):
        say("loading the images into the nodes")
        with exclusive("images"):
            node_images.load(image_builds.IMAGES)


def references() -> dict[str, str]:
    """What the tests put into `image:`."""
    return {name: os.environ.get(variable) or f"disttrain/{name}:test" for name, variable in _NAMES_GIVEN.items()}


def _provide_elsewhere(say: Say) -> None:
    if all(os.environ.get(variable) for variable in _NAMES_GIVEN.values()):
        return
    cluster = kind_cluster(run(["kubectl", "config", "current-context"]).strip())
    if cluster is None:
        raise MissingError(
            "KUBECONFIG names a cluster that must pull its images: build and push the two Dockerfiles' images and name "
            f"them by {' and '.join(_NAMES_GIVEN.values())}"
        )
    for name, dockerfile in image_builds.DOCKERFILES.items():
        say(f"building disttrain/{name}:test with docker, for kind")
        tag = f"disttrain/{name}:test"
        run(["docker", "build", "--file", REPOSITORY / dockerfile, "--tag", tag, REPOSITORY])
        run(["kind", "load", "docker-image", tag, "--name", cluster])


def kind_cluster(context: str) -> str | None:
    """kind calls its contexts `kind-NAME`."""
    return context.removeprefix("kind-") if context.startswith("kind-") else None
