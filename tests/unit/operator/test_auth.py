"""Where the API server is, and with which credentials."""

import base64
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from disttrain_operator.kube import auth
from disttrain_operator.kube.auth import Access, FileToken, find_access, from_kubeconfig, in_cluster
from disttrain_operator.kube.errors import AccessError
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
    data = base64.b64encode(b"the certificate").decode()
    path = a_kubeconfig(tmp_path, {"client-certificate-data": data}, {"certificate-authority": "ca.pem"})
    access = from_kubeconfig(path)
    assert (access.server, access.namespace) == ("https://example:6443", "team")
    assert (access.ca, access.certificate, access.token()) == ("the CA", "the certificate", None)


@pytest.mark.parametrize(("text", "sentence"), [*(BOMBS | OF_OTHER_FILES).values(), ("a: [", "not YAML: ")])
def test_a_kubeconfig_is_read_within_bounds(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(AccessError, match=re.escape(f"{path} is no kubeconfig: {sentence}")):
        from_kubeconfig(path)


def test_a_token_and_a_token_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from a file\n")
    assert from_kubeconfig(a_kubeconfig(tmp_path, {"token": "plain"})).token() == "plain"
    assert from_kubeconfig(a_kubeconfig(tmp_path, {"tokenFile": "token"})).token() == "from a file"


def test_a_plugin_prints_the_token_and_is_asked_once(tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    plugin.write_text('#!/bin/sh\necho called >> "$LOG"\necho "{\\"status\\": {\\"token\\": \\"$PREFIX-$1\\"}}"\n')
    plugin.chmod(plugin.stat().st_mode | stat.S_IXUSR)
    log = tmp_path / "log"
    environment = [{"name": "PREFIX", "value": "printed"}, {"name": "LOG", "value": str(log)}]
    path = a_kubeconfig(tmp_path, {"exec": {"command": "./plugin", "args": ["token"], "env": environment}})
    token = from_kubeconfig(path).token
    assert (token(), token()) == ("printed-token", "printed-token")
    assert log.read_text() == "called\n"


def test_a_rotated_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("old")
    token = FileToken(path)
    assert token() == "old"
    path.write_text("new")
    monkeypatch.setattr(auth, "_REREAD_SECONDS", 0.0)
    assert token() == "new"


def test_the_service_account_of_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("token", "t"), ("ca.crt", "the CA"), ("namespace", "operators")):
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    access = in_cluster(tmp_path)
    assert (access.server, access.namespace, access.token()) == ("https://[fd00::1]:443", "operators", "t")


@pytest.mark.parametrize(
    ("context", "words"), [("nowhere", "no context named 'nowhere'"), (None, "no readable kubeconfig")]
)
def test_what_is_missing_is_said(tmp_path: Path, context: str | None, words: str) -> None:
    path = a_kubeconfig(tmp_path, {}) if context else tmp_path / "absent"
    with pytest.raises(AccessError, match=words):
        find_access(str(path), context)


def test_plain_http_needs_no_certificates() -> None:
    assert Access("http://127.0.0.1:8001").ssl_context() is None
