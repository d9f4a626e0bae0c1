"""What is written on a volume that others may write to goes where it is meant to, whatever they have put there."""

import os
from pathlib import Path

import pytest

from disttrain_trainer.parameter_server.protocol.wire import Message, key_of
from disttrain_trainer.parameter_server.server.snapshots import Snapshots
from disttrain_trainer.runtime import files
from disttrain_trainer.runtime.files import write_atomically


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def test_a_link_at_a_name_that_can_be_foreseen_is_not_followed(tmp_path: Path, victim: Path) -> None:
    (tmp_path / f".report.{os.getpid()}.tmp").symlink_to(victim)
    write_atomically(tmp_path / "report", "content")
    assert (tmp_path / "report").read_text() == "content"
    assert not (tmp_path / "report").is_symlink()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "file"])
def test_not_even_at_the_used_name(tmp_path: Path, victim: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(files, "token_hex", lambda length: "0" * 2 * length)
    there = tmp_path / f".report.{'0' * 16}.tmp"
    if kind == "link":
        there.symlink_to(victim)
    else:
        there.hardlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "report", "content")
    assert victim.read_text() == "mine"
    assert there.exists(), "it is somebody else's"
    assert not (tmp_path / "report").exists()


def test_no_two_writes_take_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda self, target: names.append(self.name) or replace(self, target))
    for _ in range(100):
        write_atomically(tmp_path / "report", "content")
    assert len(set(names)) == 100
    assert [path.name for path in tmp_path.iterdir()] == ["report"]


def test_a_snapshot_follows_no_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "server-0.part").symlink_to(victim)
    written: list[bool] = []
    snapshots = Snapshots(tmp_path / "server-0.snapshot", key_of("token", "uid", 1), None, lambda: written.append(True))
    snapshots._write(Message("snapshot", {"version": 1}))
    assert written == [True]
    assert victim.read_text() == "mine"
    assert snapshots.read() is not None
