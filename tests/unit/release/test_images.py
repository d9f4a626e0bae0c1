"""`make images`: its command lines, and the whole of it with programs that write down how they are called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from release.images import Request, RequestError, commands, install_command, request, version
from tests.waiting import GENEROUS
from tools.cluster.paths import IMAGE_TAG, REPOSITORY

FOLDER = Path("/archives")


def lines(wanted: Request, builder: str = "docker") -> list[str]:
    return [" ".join(command) for command in commands(wanted, builder, FOLDER)]


def builds(builder: str, operator: str, trainer: str, options: str = "") -> list[str]:
    return [
        f"{builder} build --file operator/Dockerfile --tag {operator}{options} .",
        f"{builder} build --file trainer_image/Dockerfile --tag {trainer}{options} .",
    ]


def test_a_registry_gets_both_under_its_name() -> None:
    wanted = request("registry.example.org:5000/ml/", "", "1.0", "--platform linux/amd64", "kind-dev")
    operator, trainer = (f"registry.example.org:5000/ml/disttrain-{name}:1.0" for name in ("operator", "trainer"))
    for builder in ("docker", "podman"):
        assert lines(wanted, builder) == [
            *builds(builder, operator, trainer, " --platform linux/amd64"),
            f"{builder} push {operator}",
            f"{builder} push {trainer}",
        ]
    assert install_command(wanted).split("--wait ")[1].split() == [
        *("--timeout", "10m", "\\", "--set", "image.repository=registry.example.org:5000/ml/disttrain-operator"),
        *("--set-string", "image.tag=1.0", "\\"),
        *("--set", "trainer.image.repository=registry.example.org:5000/ml/disttrain-trainer"),
        *("--set-string", "trainer.image.tag=1.0"),
    ]


@pytest.mark.parametrize(
    ("cluster", "context", "loads"),
    [
        ("", "kind-dev", ["kind load docker-image {} --name dev"]),
        ("kind", "minikube", ["kind load docker-image {} --name kind"]),
        ("", "minikube", ["minikube image load {}"]),
        ("minikube", "a-profile", ["minikube image load {}"]),
        ("", "k3d-dev", ["k3d image import {} --cluster dev"]),
        ("k3d", "", ["k3d image import {} --cluster k3s-default"]),
    ],
)
def test_a_cluster_loads_what_docker_has_built(cluster: str, context: str, loads: list[str]) -> None:
    operator, trainer = "disttrain/operator:1", "disttrain/trainer:1"
    wanted = request("", cluster, "1", "", context)
    expected = [load.format(name) for load in loads for name in (operator, trainer)]
    assert lines(wanted) == [*builds("docker", operator, trainer), *expected]
    assert "image.repository=disttrain/operator" in install_command(wanted)


@pytest.mark.parametrize(
    ("context", "load"),
    [
        ("kind-dev", "kind load image-archive {} --name dev"),
        ("minikube", "minikube image load {}"),
        ("k3d-dev", "k3d image import {} --cluster dev"),
    ],
)
def test_what_podman_has_built_goes_through_archives_under_its_full_name(context: str, load: str) -> None:
    operator, trainer = "docker.io/disttrain/operator:1", "docker.io/disttrain/trainer:1"
    assert lines(request("", "", "1", "", context), "podman") == [
        *builds("podman", operator, trainer),
        f"podman save --format docker-archive --output /archives/operator.tar {operator}",
        f"podman save --format docker-archive --output /archives/trainer.tar {trainer}",
        load.format("/archives/operator.tar"),
        load.format("/archives/trainer.tar"),
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"push": "a.example/b", "cluster": "kind"}, "give PUSH or CLUSTER, not both"),
        ({"push": "https://a.example/b"}, "no registry/prefix such as"),
        ({"push": "a.example/B"}, "in lower case"),
        ({"cluster": "eks"}, "CLUSTER=eks is none of kind, minikube, k3d; of any other cluster give PUSH"),
        ({"context": "prod"}, "kubectl's current context prod is none of kind, minikube, k3d: give PUSH="),
        ({}, "kubectl has no current context: give PUSH="),
        ({"cluster": "kind", "tag": "latest"}, "TAG=latest: nodes pull that tag each time"),
        ({"cluster": "kind", "tag": "a/b"}, "TAG=a/b is no tag"),
    ],
)
def test_what_cannot_be_done_is_reported(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(RequestError) as refused:
        request(**({"push": "", "cluster": "", "tag": "1", "options": "", "context": ""} | given))
    assert sentence in str(refused.value)


def test_the_values_are_those_of_the_chart() -> None:
    values = yaml.safe_load((REPOSITORY / "helm" / "disttrain" / "values.yaml").read_text())
    wanted = request("", "kind", version(), "", "")
    assert version() == IMAGE_TAG
    assert values["image"]["repository"] == wanted.repository("operator")
    assert values["trainer"]["image"]["repository"] == wanted.repository("trainer")
    assert (values["image"]["tag"], values["trainer"]["image"]["tag"]) == ("", "")


class Terminal:
    """A clone with programs on PATH that write down how they are called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        self.calls.write_text("")
        self.program = shutil.which("make") or "make"

    def add(self, name: str, script: str = "") -> None:
        """Put a program on PATH; `script` runs after its call is written down."""
        program = self.folder / name
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {self.calls}\n{script}\n')
        program.chmod(0o755)

    def make(self, *variables: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.folder), "HOME": os.environ["HOME"]}
        return subprocess.run(
            [self.program, "images", f"PYTHON={sys.executable}", *variables],
            check=False,
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            timeout=GENEROUS,
        )


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    return Terminal(tmp_path)


def test_make_images_builds_loads_and_names_them(terminal: Terminal) -> None:
    terminal.add("docker")
    terminal.add("kind")
    terminal.add("kubectl", "echo kind-dev")
    done = terminal.make()
    assert done.returncode == 0, done.stderr
    names = [f"disttrain/{name}:{IMAGE_TAG}" for name in ("operator", "trainer")]
    assert terminal.calls.read_text().splitlines() == [
        "kubectl config current-context",
        "docker version",
        *builds("docker", *names),
        *(f"kind load docker-image {name} --name dev" for name in names),
    ]
    values = f"--set trainer.image.repository=disttrain/trainer --set-string trainer.image.tag={IMAGE_TAG}"
    assert done.stdout.rstrip().endswith(values)


def test_the_test_cluster_gets_its_images_without_docker(terminal: Terminal) -> None:
    terminal.add("make")
    terminal.add("kubectl", "echo disttrain")
    assert terminal.make().returncode == 0
    assert terminal.calls.read_text().splitlines() == ["kubectl config current-context", "make cluster-images"]


def test_a_push_with_podman_where_docker_does_not_answer(terminal: Terminal) -> None:
    terminal.add("docker", "exit 1")
    terminal.add("podman")
    done = terminal.make("PUSH=localhost:5000/me", "TAG=dev", "BUILD_OPTIONS=--build-arg 'SYSTEM_PACKAGES=g++ gcc'")
    assert done.returncode == 0, done.stderr
    assert terminal.calls.read_text().splitlines()[-1] == "podman push localhost:5000/me/disttrain-trainer:dev"
    assert "--build-arg SYSTEM_PACKAGES=g++ gcc" in terminal.calls.read_text()
    assert "--set image.repository=localhost:5000/me/disttrain-operator --set-string image.tag=dev" in done.stdout


def test_without_a_builder_or_the_clusters_program_one_sentence_says_so(terminal: Terminal) -> None:
    done = terminal.make("CLUSTER=kind")
    assert done.returncode != 0
    assert "images are built by docker or podman, and docker is not installed, podman is not installed" in done.stderr
    terminal.add("docker", "echo 'Cannot connect to the daemon' >&2; exit 1")
    assert (
        "docker does not answer (Cannot connect to the daemon), podman is not" in terminal.make("CLUSTER=kind").stderr
    )
    terminal.add("docker")
    assert "k3d is not installed: it loads images into its nodes" in terminal.make("CLUSTER=k3d").stderr
    assert "Traceback" not in terminal.make("CLUSTER=k3d").stderr
    assert "build" not in terminal.calls.read_text()


def test_a_failed_build_ends_it(terminal: Terminal) -> None:
    terminal.add("docker", '[ "$1" = version ]')
    done = terminal.make("PUSH=localhost:5000/me")
    assert done.returncode != 0
    assert "make images: docker build failed, as it says above" in done.stderr
    assert "helm install" not in done.stdout
    assert len(terminal.calls.read_text().splitlines()) == 2
