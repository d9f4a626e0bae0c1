"""The key of the jobs' tokens: a file that holds none is refused at the start."""

import sys
from pathlib import Path

import pytest

from disttrain_operator.__main__ import MIN_KEY_BYTES, main, token_key
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.settings import Settings


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\0" * 4, b"short", b"x" * (MIN_KEY_BYTES - 1) + b"\n"])
def test_a_file_without_a_long_key_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(AccessError) as refused:
        token_key(Settings(token_key_file=file))
    assert str(file) in str(refused.value)
    assert f"at least {MIN_KEY_BYTES} bytes" in str(refused.value)


def test_a_long_key_is_taken_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 48 + b"\n")
    assert token_key(Settings(token_key_file=file)) == b"k" * 48


def test_keys_of_processes_without_a_file_differ() -> None:
    assert token_key(Settings()) != token_key(Settings())


def test_the_process_ends_with_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "key"
    file.touch()
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c, user: u}}],"
        " clusters: [{name: c, cluster: {server: 'http://127.0.0.1:9'}}], users: [{name: u, user: {}}]}"
    )
    monkeypatch.setattr(sys, "argv", ["disttrain-operator", f"--kubeconfig={kubeconfig}", f"--token-key-file={file}"])
    for what in ("disttrain_operator.__main__.set_up_logging", "gc.freeze", "sys.setswitchinterval"):
        monkeypatch.setattr(what, lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert f"cannot start: --token-key-file {file} holds a key of 0 bytes" in caplog.text
    assert "Traceback" not in caplog.text
