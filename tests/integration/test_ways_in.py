"""Both clients reach a real API server by all that a kubeconfig and the environment may say of the way and of them."""

import asyncio
import base64
import json
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from disttrain.cluster.api import Api
from disttrain_operator.kube.auth import Access
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.kubeconfig import find_access
from tests.forward_proxy import ForwardProxy
from tests.integration.operator_process import Team, running_operator
from tools.cluster.certificates import Certificate
from tools.cluster.control_plane import ControlPlane

Raw = dict[str, Any]
Ask = Callable[[Access, int], list[str]]
# A name that nobody resolves: only the proxy leads there. The certificate is for `kubernetes`.
ELSEWHERE = "kube.example.test:6443"
WHO = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


def by_the_operators_client(access: Access, times: int) -> list[str]:
    async def ask() -> list[str]:
        client = Client(access, retry_delays=())
        try:
            return [_name(await client.create(WHO, _review())) for _ in range(times)]
        finally:
            await client.close()

    return asyncio.run(ask())


def by_the_commands_client(access: Access, times: int) -> list[str]:
    api = Api(access)
    return [_name(api.create(WHO, _review(), what="who am I")) for _ in range(times)]


def _review() -> Raw:
    return {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}


def _name(answer: Raw) -> str:
    return str(answer["status"]["userInfo"]["username"])


@pytest.fixture(params=[by_the_operators_client, by_the_commands_client])
def ask(request: pytest.FixtureRequest) -> Ask:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "KUBECONFIG", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def proxy(api_server: ControlPlane) -> Iterator[ForwardProxy]:
    address = urlsplit(api_server.url)
    with ForwardProxy((str(address.hostname), address.port or 443)) as started:
        yield started


def a_kubeconfig(plane: ControlPlane, path: Path, user: Raw, **cluster: str) -> Path:
    root = base64.b64encode(plane.root_certificate.read_bytes()).decode()
    named = {"server": plane.url, "certificate-authority-data": root, **cluster}
    config = {
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {name: value for name, value in named.items() if value}}],
        "users": [{"name": "me", "user": user}],
    }
    path.write_text(json.dumps({name: value for name, value in config.items() if user or name != "users"}))
    return path


def as_user(certificate: Certificate) -> Raw:
    return {"client-certificate": str(certificate.certificate), "client-key": str(certificate.key)}


@pytest.mark.parametrize("way", ["proxy-url", "HTTPS_PROXY"])
def test_through_a_proxy_to_a_server_of_another_name(api_server, proxy, ask, tmp_path, monkeypatch, way):
    address = proxy.url.replace("//", "//me:a%20secret@")
    cluster = {"server": f"https://{ELSEWHERE}", "tls-server-name": "kubernetes"}
    if way == "proxy-url":
        cluster[way] = address
    else:
        monkeypatch.setenv(way, address)
        monkeypatch.setenv("NO_PROXY", "10.0.0.0/8,.svc,.cluster.local")
    user = as_user(api_server.certificate("someone", "someone"))
    path = a_kubeconfig(api_server, tmp_path / "config", user, **cluster)
    access = find_access(str(path))
    assert ask(access, 2) == ["someone", "someone"]
    basic = "Basic " + base64.b64encode(b"me:a secret").decode()
    assert proxy.asked == [(f"CONNECT {ELSEWHERE}", basic)]
    with pytest.raises(Exception, match=r"(?i)certificate"):
        ask(replace(access, server_name=None), 1)


def test_by_the_authorities_of_ssl_cert_file(api_server, ask, tmp_path, monkeypatch):
    user = as_user(api_server.certificate("someone", "someone"))
    path = a_kubeconfig(api_server, tmp_path / "config", user, **{"certificate-authority-data": ""})
    with pytest.raises(Exception, match=r"(?i)certificate"):
        ask(find_access(str(path)), 1)
    monkeypatch.setenv("SSL_CERT_FILE", str(api_server.root_certificate))
    assert ask(find_access(str(path)), 1) == ["someone"]


def test_as_a_user_of_another_file(api_server, ask, tmp_path, monkeypatch):
    """As for kubectl: of two clusters, users or contexts of one name the first counts, whatever the second holds."""
    user = as_user(api_server.certificate("someone", "someone"))
    first = a_kubeconfig(api_server, tmp_path / "first", {})
    second = a_kubeconfig(api_server, tmp_path / "second", user, server="https://nobody.example.test")
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(["", str(tmp_path / "absent"), str(first), str(second)]))
    assert ask(find_access(), 1) == ["someone"]


def test_as_whom_a_plugin_says_and_then_as_another(api_server: ControlPlane, ask: Ask, tmp_path: Path) -> None:
    """A certificate belongs to a connection: a new one needs new connections."""
    for number, name in enumerate(("one", "two"), 1):
        issued = api_server.certificate(f"user-{name}", f"user-{name}")
        status = {
            "clientCertificateData": issued.certificate.read_text(),
            "clientKeyData": issued.key.read_text(),
            "expirationTimestamp": "2020-01-01T00:00:00Z" if number == 1 else "2999-01-01T00:00:00Z",
        }
        (tmp_path / str(number)).write_text(json.dumps({"kind": "ExecCredential", "status": status}))
    plugin = tmp_path / "plugin"
    # Expired at once: it is asked again, and then says the second.
    plugin.write_text(
        '#!/bin/sh\ncd "$(dirname "$0")"\necho >> calls\ntest $(wc -l < calls) -gt "$1" && cat 2 || cat 1\n'
    )
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    user = {"exec": {"command": "./plugin", "args": ["4"], "apiVersion": "client.authentication.k8s.io/v1"}}
    names = ask(find_access(str(a_kubeconfig(api_server, tmp_path / "config", user))), 8)
    assert (names[0], names[-1]) == ("user-one", "user-two")


def test_the_operator_serves_jobs_through_a_proxy(control_plane, proxy, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    user = as_user(control_plane.certificate("through-proxy", "through-proxy", "system:masters"))
    cluster = {"server": f"https://{ELSEWHERE}", "tls-server-name": "kubernetes"}
    path = a_kubeconfig(control_plane, tmp_path / "config", user, **cluster)
    team = Team(control_plane.api, "through-proxy")
    with running_operator(control_plane, tmp_path, f"--kubeconfig={path}"):
        team.create()
        team.wait_for_pods(2)
    assert {asked for asked, _ in proxy.asked} == {f"CONNECT {ELSEWHERE}"}
