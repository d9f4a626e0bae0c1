"""Credentials of a pod, and what is in a kubeconfig."""

import base64
import json
import os
import re
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from disttrain_operator.kube import auth
from disttrain_operator.kube.auth import Access, FileToken, in_cluster
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.kube.kubeconfig import find_access, from_kubeconfig
from tests.unit.api.yaml_bombs import BOMBS, OF_OTHER_FILES


def a_kubeconfig(folder: Path, user: dict[str, Any], cluster: dict[str, Any] | None = None) -> Path:
    path = folder / "config"
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://example:6443/", **(cluster or {})}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(config))
    return path


def test_certificates_inside_and_beside_a_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("the CA")
    (tmp_path / "key.pem").write_text("the key")
    data = base64.b64encode(b"the certificate").decode()
    user = {"client-certificate-data": data, "client-key": "key.pem"}
    path = a_kubeconfig(tmp_path, user, {"certificate-authority": "ca.pem", "tls-server-name": "kube"})
    access = from_kubeconfig([path])
    assert (access.server, access.namespace, access.server_name) == ("https://example:6443", "team", "kube")
    assert (access.ca, access.credentials.certificate(), access.credentials.token()) == (
        "the CA",
        ("the certificate", "the key"),
        None,
    )


def test_a_kubeconfigs_proxy_wins_over_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://of-all:1")
    monkeypatch.setenv("NO_PROXY", "example")
    assert from_kubeconfig([a_kubeconfig(tmp_path, {})]).proxy is None
    assert from_kubeconfig([a_kubeconfig(tmp_path, {}, {"proxy-url": "http://its-own:2"})]).proxy == "http://its-own:2"
    monkeypatch.delenv("NO_PROXY")
    assert from_kubeconfig([a_kubeconfig(tmp_path, {})]).proxy == "http://of-all:1"


@pytest.mark.parametrize(
    ("user", "cluster", "sentence"),
    [
        ({"as": "root"}, {}, "as of a kubeconfig's user is not supported: use a token"),
        ({"username": "me", "password": "x"}, {}, "username of a kubeconfig's user is not supported"),
        ({"client-key-data": "a2V5"}, {}, "give both or neither"),
        ({"client-certificate": "absent.pem"}, {}, "client-certificate of the kubeconfig cannot be read at "),
        ({"exec": {"command": "p", "interactiveMode": "Always"}}, {}, "there is no terminal"),
        ({}, {"server": ""}, "cluster 'c' has no server"),
        ({}, {"proxy-url": "socks5://proxy"}, "proxy-url of the kubeconfig names a proxy by socks5://…; expected http"),
    ],
)
def test_the_unusable_is_refused(tmp_path: Path, user: dict[str, Any], cluster: dict[str, Any], sentence: str) -> None:
    with pytest.raises(AccessError, match=re.escape(sentence)):
        from_kubeconfig([a_kubeconfig(tmp_path, user, cluster)])


@pytest.mark.parametrize(("text", "sentence"), [*(BOMBS | OF_OTHER_FILES).values(), ("a: [", "not YAML: ")])
def test_a_kubeconfig_is_read_within_bounds(tmp_path: Path, text: str, sentence: str) -> None:
    """Red where PyYAML reads the file by itself."""
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match=re.escape(f"{path} is no kubeconfig: {sentence}")):
        from_kubeconfig([path])


def test_a_token_and_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from a file\n")
    for user, token in (({"token": "plain"}, "plain"), ({"tokenFile": "token"}, "from a file")):
        assert from_kubeconfig([a_kubeconfig(tmp_path, user)]).credentials.token() == token


def a_plugin(folder: Path, **status: str) -> tuple[dict[str, Any], Path]:
    """The `exec` of a user whose plug-in prints that status, and what it is called with: a line for each call."""
    log = folder / "log"
    plugin = folder / "plugin"
    printed = json.dumps({"kind": "ExecCredential", "status": status})
    plugin.write_text(f"""#!/bin/sh\necho "$KUBERNETES_EXEC_INFO" >> "$LOG"\ncat <<END\n{printed}\nEND\n""")
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    environment = [{"name": "PREFIX", "value": "printed"}, {"name": "LOG", "value": str(log)}]
    return {"exec": {"command": "./plugin", "args": ["token"], "env": environment}}, log


def test_a_plugin_prints_the_token_and_is_asked_once(tmp_path: Path) -> None:
    user, log = a_plugin(tmp_path, token="$PREFIX-$1")
    credentials = from_kubeconfig([a_kubeconfig(tmp_path, user)]).credentials
    assert (credentials.token(), credentials.token()) == ("printed-token", "printed-token")
    (called,) = map(json.loads, log.read_text().splitlines())
    assert called["spec"] == {"interactive": False}


def test_a_plugin_prints_a_certificate_and_gets_the_cluster(tmp_path: Path) -> None:
    user, log = a_plugin(tmp_path, clientCertificateData="the certificate", clientKeyData="the key")
    user["exec"]["provideClusterInfo"] = True
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "here"}}
    (tmp_path / "ca.pem").write_text("the CA")
    cluster = {"certificate-authority": "ca.pem", "extensions": [extension]}
    credentials = from_kubeconfig([a_kubeconfig(tmp_path, user, cluster)]).credentials
    assert (credentials.token(), credentials.certificate()) == (None, ("the certificate", "the key"))
    assert json.loads(log.read_text())["spec"]["cluster"] == {
        "server": "https://example:6443/",
        "certificate-authority-data": base64.b64encode(b"the CA").decode(),
        "config": {"audience": "here"},
    }


@pytest.mark.parametrize(
    ("lives", "refused", "calls"), [(None, False, 1), (None, True, 2), (3600, False, 1), (30, False, 2)]
)
def test_a_plugin_is_asked_again_for_what_expires_or_is_refused(tmp_path, lives, refused, calls):
    status = {"token": "t"}
    if lives is not None:
        status["expirationTimestamp"] = (datetime.now(UTC) + timedelta(seconds=lives)).isoformat()
    user, log = a_plugin(tmp_path, **status)
    credentials = from_kubeconfig([a_kubeconfig(tmp_path, user)]).credentials
    credentials.token()
    if refused:
        credentials.refused()
    credentials.token()
    assert len(log.read_text().splitlines()) == calls


@pytest.mark.parametrize("status", [{}, {"clientCertificateData": "without its key"}])
def test_a_plugin_that_prints_nothing_of_use_is_named(tmp_path: Path, status: dict[str, str]) -> None:
    user, _ = a_plugin(tmp_path, **status)
    with pytest.raises(AccessError, match=r"credential plugin .*/plugin gave no credentials"):
        from_kubeconfig([a_kubeconfig(tmp_path, user)]).credentials.token()


def test_a_rotated_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    credentials = FileToken(path)
    assert credentials.token() == "old"
    path.write_text("new")
    credentials.refused()
    assert credentials.token() == "new"
    path.write_text("newer")
    monkeypatch.setattr(auth, "_REREAD_SECONDS", 0.0)
    assert credentials.token() == "newer"


def test_the_service_account_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    for name, text in (("token", "t"), ("ca.crt", "the CA"), ("namespace", "operators")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    access = in_cluster(tmp_path)
    assert (access.server, access.namespace, access.credentials.token()) == ("https://[fd00::1]:443", "operators", "t")
    assert (access.proxy, access.in_pod) == ("http://proxy:1", True)


def test_a_kubeconfig_comes_before_the_service_account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain_operator.kube.kubeconfig.SERVICE_ACCOUNT", tmp_path)
    of_pod = Access("https://of-the-pod", in_pod=True)
    monkeypatch.setattr("disttrain_operator.kube.kubeconfig.in_cluster", lambda: of_pod)
    (tmp_path / "token").write_text("t")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    for files, server in (("", "https://of-the-pod"), (os.pathsep.join(["absent", "config"]), "https://example:6443")):
        monkeypatch.chdir(a_kubeconfig(tmp_path, {}).parent)
        monkeypatch.setenv("KUBECONFIG", files)
        assert (find_access().server, find_access().in_pod) == (server, not files)


@pytest.mark.parametrize(
    ("context", "message"), [("nowhere", "no context named 'nowhere'"), (None, "no readable kubeconfig")]
)
def test_what_is_missing_is_reported(tmp_path: Path, context: str | None, message: str) -> None:
    path = a_kubeconfig(tmp_path, {}) if context else tmp_path / "absent"
    with pytest.raises(AccessError, match=message):
        find_access(str(path), context)


def test_plain_http_needs_no_certificates() -> None:
    assert Access("http://127.0.0.1:8001").ssl_context() is None
