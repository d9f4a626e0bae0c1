"""The folder of a run: who can read what is in it, and what of it is read."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from disttrain.errors import CommandError
from disttrain.local.folder import RunFolder
from disttrain_api.names import CONFIG_FILE, TOKEN_FILE
from tests.unit.api.yaml_bombs import BOMBS, OF_OTHER_FILES

SECRET = {CONFIG_FILE: "{}", TOKEN_FILE: "secret"}


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


@pytest.mark.usefixtures("open_umask")
def test_the_token_is_its_owners_alone_from_its_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red where others may open the file, however short the time."""
    seen: list[tuple[str, int, int]] = []
    plainly = os.open

    def watched(path: Path, flags: int, mode: int = 0o777, **more: int) -> int:
        descriptor = plainly(path, flags, mode, **more)
        if flags & os.O_CREAT:
            seen.append((Path(path).name, os.fstat(descriptor).st_mode & 0o777, flags & os.O_EXCL))
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    # A mode that is put right afterwards is too late: whoever has opened the file by then reads on.
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("a mode was put right afterwards"))
    RunFolder(tmp_path).write_support(SECRET, None)
    assert seen == [(".token.part", 0o600, os.O_EXCL)]
    token = tmp_path / "config" / TOKEN_FILE
    assert (token.read_text(), mode(token)) == ("secret", 0o600)
    assert names(token.parent) == {CONFIG_FILE, TOKEN_FILE}


@pytest.mark.usefixtures("open_umask")
def test_a_token_of_an_earlier_version_is_closed_and_one_that_changes_replaced(tmp_path: Path) -> None:
    folder, token = RunFolder(tmp_path), tmp_path / "config" / TOKEN_FILE
    token.parent.mkdir()
    token.write_text("secret")
    before = token.stat()
    folder.write_support(SECRET, None)
    assert (mode(token), token.stat().st_ino) == (0o600, before.st_ino)
    folder.write_support(SECRET | {TOKEN_FILE: "another"}, None)
    assert (mode(token), token.read_text()) == (0o600, "another")
    assert token.stat().st_ino != before.st_ino


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("name", [TOKEN_FILE, ".token.part"])
def test_no_link_leads_the_token_elsewhere(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("secret")
    elsewhere.chmod(0o644)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / name).symlink_to(elsewhere)
    RunFolder(tmp_path).write_support(SECRET, None)
    token = tmp_path / "config" / TOKEN_FILE
    assert (elsewhere.read_text(), mode(elsewhere)) == ("secret", 0o644)
    assert (token.is_symlink(), mode(token), token.read_text()) == (False, 0o600, "secret")


def test_a_disk_without_room_leaves_the_former_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, token = RunFolder(tmp_path), tmp_path / "config" / TOKEN_FILE
    folder.write_support(SECRET, None)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_support(SECRET | {TOKEN_FILE: "another"}, None)
    assert token.read_text() == "secret"
    assert names(token.parent) == {CONFIG_FILE, TOKEN_FILE}


@pytest.mark.parametrize("name", ["values that aliases double", "objects that merge keys double", "lists in lists"])
def test_a_status_that_stands_for_more_than_it_says_is_refused_by_its_sentence(tmp_path: Path, name: str) -> None:
    text, sentence = (BOMBS | OF_OTHER_FILES)[name]
    (tmp_path / "status.yaml").write_text(text)
    with pytest.raises(CommandError, match="is damaged: ") as refused:
        RunFolder(tmp_path).read_job()
    assert str(refused.value).endswith(f"is damaged: {sentence}")


def test_words_that_yaml_reads_in_two_ways_come_back_as_they_were(tmp_path: Path) -> None:
    scalars = ["3e-4", "0o14", "012", "09", "on", "1_000", "2026-01-01", "1:30", "null", "=", "~", "é\u202e"]
    text = yaml.safe_dump(scalars)
    folder = RunFolder(tmp_path)
    job = {
        "apiVersion": "disttrain.io/v1alpha1",
        "kind": "DistTrainingJob",
        "metadata": {"name": "digits"},
        "spec": {"workers": {"image": "i", "command": scalars}},
    }
    folder.write_job(job)
    assert folder.read_job() == job
    assert yaml.safe_load(text) == scalars
