"""The key of the jobs' tokens: in a file, which is refused where it holds none, or in a Secret that is made once."""

import asyncio
import base64
import sys
from pathlib import Path

import pytest

from disttrain_operator.__main__ import main
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.settings import Settings
from disttrain_operator.token_key import MIN_KEY_BYTES, file_or_random_key, key_of_secret
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\0" * 4, b"short", b"x" * (MIN_KEY_BYTES - 1) + b"\n"])
def test_a_file_without_a_long_key_is_refused(tmp_path: Path, content: bytes) -> None:
    """Red without the look at the length of the key."""
    file = tmp_path / "key"
    file.write_bytes(content)
    with pytest.raises(AccessError) as refused:
        file_or_random_key(Settings(token_key_file=file))
    assert str(file) in str(refused.value)
    assert f"at least {MIN_KEY_BYTES} bytes" in str(refused.value)


def test_a_long_key_is_taken_without_its_line_end(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"k" * 48 + b"\n")
    assert file_or_random_key(Settings(token_key_file=file)) == b"k" * 48


def test_keys_of_processes_without_a_file_differ() -> None:
    assert file_or_random_key(Settings()) != file_or_random_key(Settings())


def test_the_process_ends_with_the_sentence(tmp_path, monkeypatch, caplog):
    """Red where the error is not reported, and without end where the key's length is not looked at."""
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


SECRETS = "/api/v1/namespaces/ops/secrets"
SECRET = f"{SECRETS}/tokens"


def stored(api: FakeApi) -> bytes:
    return base64.b64decode(api.objects[SECRET]["data"]["key"])


async def test_the_first_replica_makes_the_secret_and_the_others_read_it(api: FakeApi, client: Client) -> None:
    keys = await asyncio.gather(*(key_of_secret(client, "ops/tokens") for _ in range(3)))
    assert {len(key) >= MIN_KEY_BYTES for key in keys} == {True}
    assert set(keys) == {stored(api)}
    assert await key_of_secret(client, "ops/tokens") == stored(api)
    assert api.objects[SECRET]["immutable"] is True


async def test_who_loses_the_race_takes_the_winners_key(api: FakeApi, client: Client) -> None:
    winners = base64.b64encode(b"w" * MIN_KEY_BYTES).decode()

    def faster(method: str, path: str, body: object) -> None:
        if method == "POST" and SECRET not in api.objects:
            api.objects[SECRET] = {"metadata": {"name": "tokens", "uid": "1"}, "data": {"key": winners}}

    api.refusals.append(faster)
    assert await key_of_secret(client, "ops/tokens") == b"w" * MIN_KEY_BYTES


async def test_rights_that_come_late_are_waited_for(api, client, monkeypatch, caplog):
    monkeypatch.setattr("disttrain_operator.token_key.POLL_SECONDS", 0.01)
    api.refusals.append(lambda method, path, body: refusal(403, "Forbidden", "no right") if path == SECRET else None)
    waiting = asyncio.create_task(key_of_secret(client, "ops/tokens"))
    await eventually(lambda: "ops/tokens" in caplog.text and "no right" in caplog.text)
    api.refusals.clear()
    assert await waiting == stored(api)


@pytest.mark.parametrize("data", [{}, {"key": ""}, {"key": "c2hvcnQ="}, {"other": "a" * 60}])
async def test_a_secret_without_a_long_key_is_refused(api: FakeApi, client: Client, data: dict[str, str]) -> None:
    """Red without the look at the length of the key."""
    await api.put(SECRET, data=data)
    with pytest.raises(AccessError) as refused:
        await key_of_secret(client, "ops/tokens")
    assert "ops/tokens" in str(refused.value)
    assert f"at least {MIN_KEY_BYTES} bytes" in str(refused.value)
