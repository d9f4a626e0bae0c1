"""`find_access`: the API server of one kubeconfig, and of several that belong together."""

import os
from pathlib import Path
from typing import Any

import kubernetes.client
import pytest
import yaml

from disttrain import Client
from disttrain.cluster.connect import access_of, find_access
from disttrain.errors import CommandError


def write(path: Path, **parts: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **parts}))
    return path


def cluster(name: str, server: str, **more: str) -> dict[str, Any]:
    return {"name": name, "cluster": {"server": server, **more}}


def context(name: str, cluster: str, user: str, **more: str) -> dict[str, Any]:
    return {"name": name, "context": {"cluster": cluster, "user": user, **more}}


@pytest.fixture
def two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context in the first file, whose user stands in the second one."""
    first = write(
        tmp_path / "one" / "config",
        clusters=[cluster("team", "https://one:6443", **{"certificate-authority": "ca.pem"})],
        contexts=[context("team", "team", "me", namespace="vision")],
        **{"current-context": "team"},
    )
    (tmp_path / "one" / "ca.pem").write_text("the first folder's")
    second = write(
        tmp_path / "two" / "config",
        clusters=[cluster("lab", "https://two:6443/", **{"insecure-skip-tls-verify": True})],
        contexts=[context("lab", "lab", "me")],
        users=[{"name": "me", "user": {"token": "secret"}}],
        **{"current-context": "lab"},
    )
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(first), str(tmp_path / "absent"), str(second)]))


@pytest.mark.usefixtures("two_files")
def test_a_context_takes_its_user_from_another_file_and_paths_are_relative_to_their_own():
    access = find_access()

    assert (access.server, access.credentials.token(), access.namespace) == ("https://one:6443", "secret", "vision")
    assert (access.ca, access.insecure) == ("the first folder's", False)


@pytest.mark.usefixtures("two_files")
def test_a_context_of_any_file_can_be_named():
    access = find_access("lab")

    assert (access.server, access.credentials.token(), access.namespace) == ("https://two:6443", "secret", "default")
    assert (access.ca, access.insecure) == (None, True)


@pytest.mark.usefixtures("two_files")
def test_a_context_of_no_file_is_refused_in_one_sentence():
    with pytest.raises(CommandError, match="nowhere") as caught:
        find_access("nowhere")

    assert "\n" not in str(caught.value)
    assert "--context" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "a: [", "clusters: 3", "contexts: [3]\ncurrent-context: x", "\x00"])
def test_what_is_no_kubeconfig_is_refused_beside_another_too(content, tmp_path, monkeypatch):
    bad = tmp_path / "bad"
    bad.write_text(content)
    good = write(tmp_path / "good", clusters=[cluster("a", "https://a")], contexts=[], users=[])
    for files in ([bad], [bad, good], [good, bad]):
        monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, files)))
        with pytest.raises(CommandError, match="no cluster to talk to"):
            find_access()


def test_a_program_hands_over_what_it_has_set_up_with_the_package_kubernetes(tmp_path: Path):
    (tmp_path / "ca.pem").write_text("an authority")
    configuration = kubernetes.client.Configuration(host="https://mine:6443/", api_key={"authorization": "first"})
    configuration.api_key_prefix = {"authorization": "Bearer"}
    configuration.ssl_ca_cert = str(tmp_path / "ca.pem")
    access = access_of(configuration)
    assert (access.server, access.ca, access.insecure) == ("https://mine:6443", "an authority", False)
    assert access.credentials.token() == "first"
    configuration.refresh_api_key_hook = lambda one: one.api_key.update(authorization="second")
    assert access.credentials.token() == "second", "its hook renews it"
    assert Client(configuration=configuration, namespace="team-a").namespace == "team-a"
    configuration.ssl_ca_cert = str(tmp_path / "absent.pem")
    with pytest.raises(CommandError, match=r"absent\.pem cannot be read"):
        access_of(configuration)
    with pytest.raises(CommandError, match="give one of them"):
        Client(configuration=configuration, context="lab")


def test_a_program_without_a_token_has_none():
    assert access_of(kubernetes.client.Configuration(host="http://mine")).credentials.token() is None
