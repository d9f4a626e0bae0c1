"""`make images`: builds both images, gives them to a cluster or a registry, prints the `helm install` that names them.

PUSH=registry/prefix pushes them, CLUSTER=kind|minikube|k3d loads them into that cluster's nodes; with neither,
kubectl's current context says which cluster. TAG is the version unless given, BUILD_OPTIONS go to both builds. The
command lines are a pure function of these.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOCKERFILES = {"operator": "operator/Dockerfile", "trainer": "trainer_image/Dockerfile"}
BUILDERS = ("docker", "podman")
CLUSTERS = {"kind": "kind", "minikube": "minikube", "k3d": "k3s-default"}
"""Kinds of clusters whose own command loads images, each with the name of a cluster that was given none."""

TEST_CLUSTER = "disttrain"
"""Context of the test cluster, whose images tools/cluster builds with other programs."""

_PREFIX = re.compile(r"[a-z0-9][a-z0-9.-]*(:[0-9]+)?(/[a-z0-9]+([._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")

Command = list[str]


class RequestError(Exception):
    """What was asked for cannot be done; the text says what can."""


@dataclass(frozen=True)
class Request:
    """Where the images go. Exactly one of `push` and `cluster` is given."""

    tag: str
    push: str = ""
    """Registry and path before the images' names."""
    cluster: str = ""
    """A key of CLUSTERS."""
    cluster_name: str = ""
    options: tuple[str, ...] = ()
    """Further options of both builds."""

    def repository(self, image: str) -> str:
        """Return the image's name without a tag, as the chart's values have it."""
        return f"{self.push}/disttrain-{image}" if self.push else f"disttrain/{image}"

    def reference(self, image: str) -> str:
        """Return the image's name with its tag."""
        return f"{self.repository(image)}:{self.tag}"


def request(push: str, cluster: str, tag: str, options: str, context: str) -> Request:
    """Return what the arguments of `make images` and kubectl's current context ask for."""
    push = push.rstrip("/")
    if push and cluster:
        raise RequestError("give PUSH or CLUSTER, not both")
    if not _TAG.fullmatch(tag):
        raise RequestError(f"TAG={tag} is no tag: letters, digits and . _ - are, at most 128 of them")
    further = tuple(shlex.split(options))
    if push:
        if not _PREFIX.fullmatch(push):
            raise RequestError(f"PUSH={push} is no registry/prefix such as registry.example.org/ml, in lower case")
        return Request(tag, push=push, options=further)
    if cluster and cluster not in CLUSTERS:
        raise RequestError(f"CLUSTER={cluster} is none of {', '.join(CLUSTERS)}; of any other cluster give PUSH")
    of_context, name = _cluster_of(context)
    kind = cluster or of_context
    if not kind:
        why = "kubectl has no current context"
        if context:
            why = f"kubectl's current context {context} is none of {', '.join(CLUSTERS)}"
        raise RequestError(f"{why}: give PUSH=registry/prefix, from which nodes pull, or CLUSTER={'|'.join(CLUSTERS)}")
    if tag == "latest":
        raise RequestError("TAG=latest: nodes pull that tag each time, and would not take what is loaded; give another")
    return Request(tag, cluster=kind, cluster_name=name if kind == of_context else CLUSTERS[kind], options=further)


def _cluster_of(context: str) -> tuple[str, str]:
    """Return (kind, name) of the cluster of a context: kind and k3d put their name before the cluster's."""
    for kind in ("kind", "k3d"):
        if context.startswith(f"{kind}-"):
            return kind, context.removeprefix(f"{kind}-")
    return (context, context) if context == "minikube" else ("", "")


def commands(wanted: Request, builder: str, folder: Path) -> list[Command]:
    """Return what is run, in order. Archives that a cluster cannot take from the builder lie in `folder` meanwhile."""
    # Short names are those of docker.io to Kubernetes; podman would call them localhost's.
    names = {
        image: ("docker.io/" if builder == "podman" and not wanted.push else "") + wanted.reference(image)
        for image in DOCKERFILES
    }
    builds = [
        [builder, "build", "--file", dockerfile, "--tag", names[image], *wanted.options, "."]
        for image, dockerfile in DOCKERFILES.items()
    ]
    if wanted.push:
        return [*builds, *([builder, "push", name] for name in names.values())]
    if builder == "docker":
        return [*builds, *_load(wanted, list(names.values()), archives=False)]
    archives = {image: str(folder / f"{image}.tar") for image in names}
    saves = [
        [builder, "save", "--format", "docker-archive", "--output", archives[image], name]
        for image, name in names.items()
    ]
    return [*builds, *saves, *_load(wanted, list(archives.values()), archives=True)]


def _load(wanted: Request, given: list[str], *, archives: bool) -> list[Command]:
    if wanted.cluster == "kind":
        what = "image-archive" if archives else "docker-image"
        return [["kind", "load", what, one, "--name", wanted.cluster_name] for one in given]
    if wanted.cluster == "minikube":
        return [["minikube", "image", "load", one] for one in given]
    return [["k3d", "image", "import", one, "--cluster", wanted.cluster_name] for one in given]


def install_command(wanted: Request) -> str:
    """Return the `helm install` whose values name these images."""
    return (
        "helm install disttrain helm/disttrain -n disttrain --create-namespace --wait --timeout 10m \\\n"
        f"    --set image.repository={wanted.repository('operator')} --set-string image.tag={wanted.tag} \\\n"
        f"    --set trainer.image.repository={wanted.repository('trainer')} --set-string trainer.image.tag={wanted.tag}"
    )


def version() -> str:
    """Return the version that the chart's values have as tag."""
    found = re.search(r'^version = "(.+)"$', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def find_builder() -> str:
    """Return the first of BUILDERS that answers."""
    why = []
    for program in BUILDERS:
        if shutil.which(program) is None:
            why.append(f"{program} is not installed")
            continue
        asked = subprocess.run([program, "version"], check=False, capture_output=True, text=True)
        if asked.returncode == 0:
            return program
        why.append(f"{program} does not answer ({(asked.stderr.strip().splitlines() or ['no word'])[-1]})")
    raise RequestError(f"images are built by docker or podman, and {', '.join(why)}")


def current_context() -> str:
    """Return the name of kubectl's current context; empty where there is none, or no kubectl."""
    if shutil.which("kubectl") is None:
        return ""
    asked = ["kubectl", "config", "current-context"]
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()


def main(environment: Mapping[str, str]) -> int:
    """Run `make images`; make hands the variables of its command line on in the environment."""
    push, cluster, tag, options = (environment.get(name, "") for name in ("PUSH", "CLUSTER", "TAG", "BUILD_OPTIONS"))
    context = current_context()
    try:
        if context == TEST_CLUSTER and not (push or cluster or tag or options):
            return subprocess.run(["make", "cluster-images"], check=False, cwd=REPOSITORY).returncode
        wanted = request(push, cluster, tag or version(), options, context)
        builder = find_builder()
        if wanted.cluster and shutil.which(wanted.cluster) is None:
            raise RequestError(f"{wanted.cluster} is not installed: it loads images into its nodes")
        with tempfile.TemporaryDirectory() as folder:
            for command in commands(wanted, builder, Path(folder)):
                print(f"$ {shlex.join(command)}", flush=True)
                if subprocess.run(command, check=False, cwd=REPOSITORY).returncode != 0:
                    raise RequestError(f"{' '.join(command[:2])} failed, as it says above")
    except RequestError as error:
        print(f"make images: {error}", file=sys.stderr)
        return 2
    print(f"\nThe images are there. This installs the operator with them:\n\n{install_command(wanted)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(os.environ))
