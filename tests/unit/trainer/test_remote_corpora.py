"""Corpora in an object store: read in blocks, kept in a folder of this machine."""

import itertools
from pathlib import Path
from typing import Any

import fsspec
import pytest

from disttrain_trainer.data import remote_corpora as remote
from disttrain_trainer.data.corpora.corpus import Corpus, open_corpus
from disttrain_trainer.data.corpora.files import NumberFiles
from disttrain_trainer.data.corpora.manifest import MANIFEST_FILE, CorpusError, shard_files
from disttrain_trainer.data.corpora.spans import split
from disttrain_trainer.data.corpora.stream import TokenStream
from disttrain_trainer.data.remote_corpora import Kept, open_remote, open_remote_indexed
from disttrain_trainer.runtime.errors import StoreError
from disttrain_trainer.runtime.object_path import ObjectPath
from tests.corpora import prepared
from tests.unit.trainer.test_indexed import TOKENS, write_indexed

BLOCK = 64
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BLOCK", BLOCK)
    monkeypatch.setattr(remote, "_AT_ONCE", 4)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return prepared(tmp_path / "local", part_bytes=10_000, end_of_document="0")


@pytest.fixture
def store(local: Path) -> ObjectPath:
    """The corpus in a store of this process."""
    place = ObjectPath(f"memory://bucket-{next(_numbers)}/corpus")
    fsspec.filesystem("memory").put(f"{local}/", f"{place}/", recursive=True)
    return place


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Ranges that are asked of the store."""
    found: list[tuple[str, int, int]] = []
    read = ObjectPath.read_range

    def counted(self: ObjectPath, start: int, stop: int) -> bytes:
        found.append((self.name, start, stop))
        return read(self, start, stop)

    monkeypatch.setattr(ObjectPath, "read_range", counted)
    return found


def opened(store: ObjectPath, cache: Path) -> tuple[Corpus, NumberFiles]:
    files = NumberFiles()
    return open_remote(store, cache, files.attach), files


def tokens_of(corpus: Corpus, files: NumberFiles, fraction: float = 0.2) -> list[list[int]]:
    """All tokens, and the documents among them: of what is trained on, and of what is held out."""
    found = []
    for spans in split(corpus.shards, fraction, files):
        stream = TokenStream(spans, corpus.vocabulary, files)
        found += [stream.read(0, len(stream)).tolist(), stream.documents(0, len(stream))]
    return found


def test_it_is_the_corpus_that_lies_there(local: Path, store: ObjectPath, tmp_path: Path) -> None:
    corpus, files = opened(store, tmp_path / "cache")
    same = open_corpus(local)
    assert (corpus.fingerprint, corpus.tokens, corpus.tokenizer) == (same.fingerprint, same.tokens, same.tokenizer)
    assert tokens_of(corpus, files) == tokens_of(same, NumberFiles())


def test_blocks_arrive_when_they_are_read_and_once(
    store: ObjectPath, tmp_path: Path, asked: list[tuple[str, int, int]]
) -> None:
    """Red where whole shards are fetched, or one block twice, also by another process of the machine."""
    corpus, files = opened(store, tmp_path / "cache")
    shard = corpus.shards[0]
    del asked[:]
    size = shard.dtype.itemsize
    window = files.read(shard.path, shard.dtype, BLOCK // size - 1, 3)
    assert asked == [(shard.path.name, 0, 2 * BLOCK)], "two blocks in one request"
    assert files.read(shard.path, shard.dtype, 0, 3).size == 3
    again, others = opened(store, tmp_path / "cache")
    assert others.read(again.shards[0].path, shard.dtype, BLOCK // size - 1, 3).tolist() == window.tolist()
    assert [one for one in asked if one[0] == shard.path.name] == asked[:1]
    tokens_of(corpus, files), tokens_of(again, others)
    ranges = [(name, start, stop) for name, start, stop in asked if name != MANIFEST_FILE]
    blocks = [(name, block) for name, start, stop in ranges for block in range(start // BLOCK, -(-stop // BLOCK))]
    assert len(blocks) == len(set(blocks))
    assert max(stop - start for _, start, stop in ranges) <= 4 * BLOCK


def test_another_corpus_at_the_same_place_has_a_folder_of_its_own(store: ObjectPath, tmp_path: Path) -> None:
    first, files = opened(store, tmp_path / "cache")
    before = tokens_of(first, files)
    other = prepared(tmp_path / "other", part_bytes=20_000, end_of_document="0")
    fsspec.filesystem("memory").put(f"{other}/", f"{store}/", recursive=True)
    second, more = opened(store, tmp_path / "cache")
    assert second.path != first.path
    assert tokens_of(second, more) == tokens_of(open_corpus(other), NumberFiles()) != before


def test_a_disk_without_room_costs_time_and_nothing_else(
    local: Path, store: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red where a block that was not kept passes for one that was."""
    writes, write = itertools.count(), Kept._write
    monkeypatch.setattr(Kept, "_write", lambda *given: next(writes) % 2 == 0 and write(*given))
    corpus, files = opened(store, tmp_path / "cache")
    assert tokens_of(corpus, files) == tokens_of(open_corpus(local), NumberFiles())


def test_a_write_that_fails_is_no_room(store: ObjectPath, tmp_path: Path) -> None:
    kept = Kept(store, tmp_path)
    kept.add({"x": 10})
    assert kept._write("x", range(1), b"0123456789")
    kept.folder = Path("/dev")
    assert not kept._write("full", range(1), b"0123456789")


@pytest.mark.parametrize(
    ("change", "sentence"), [("gone", "there is no such object"), ("short", "has 3 bytes, expected")]
)
def test_a_shard_that_is_not_as_its_manifest_says_is_named(
    store: ObjectPath, tmp_path: Path, change: str, sentence: str
) -> None:
    name = shard_files(0)[0]
    memory = fsspec.filesystem("memory")
    memory.rm(f"{store}/{name}") if change == "gone" else memory.pipe_file(f"{store}/{name}", b"abc")
    with pytest.raises(CorpusError, match=sentence):
        opened(store, tmp_path / "cache")


def test_what_is_lost_while_it_is_read_is_named_and_a_store_that_is_away_may_come_back(
    store: ObjectPath, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, files = opened(store, tmp_path / "cache")
    shard = corpus.shards[0]

    def away(*_: Any) -> bytes:
        raise StoreError(None, "EndpointConnectionError")

    with monkeypatch.context() as broken:
        broken.setattr(ObjectPath, "read_range", away)
        with pytest.raises(StoreError):
            files.read(shard.path, shard.dtype, 0, 1)
    fsspec.filesystem("memory").pipe_file(f"{store}/{shard.path.name}", b"")
    with pytest.raises(CorpusError, match=r"tokens is shorter than it was when it was opened"):
        files.read(shard.path, shard.dtype, 0, 1)
    fsspec.filesystem("memory").rm(f"{store}/{shard.path.name}")
    with pytest.raises(CorpusError, match=r"memory://.*tokens cannot be read"):
        files.read(shard.path, shard.dtype, 0, 1)


def test_nothing_there_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"memory://nowhere/x/manifest.json cannot be read"):
        opened(ObjectPath("memory://nowhere/x"), tmp_path / "cache")
    (tmp_path / "file").write_text("")
    with pytest.raises(CorpusError, match="cannot"):
        remote._folder(tmp_path / "file", "u", b"")


def test_indexed_data_sets_are_read_in_the_same_way(tmp_path: Path) -> None:
    folder = write_indexed(tmp_path / "sets", older=False).parent
    store = ObjectPath(f"memory://bucket-{next(_numbers)}/sets")
    fsspec.filesystem("memory").put(f"{folder}/", f"{store}/", recursive=True)
    for name in ("set.bin", "set.idx"):
        files = NumberFiles()
        corpus = open_remote_indexed(store / name, tmp_path / "cache", 256, files.attach)
        (shard,) = corpus.shards
        found = files.read(shard.path, shard.dtype, 0, shard.tokens).tolist()
        assert found == [token for tokens in TOKENS for token in tokens]
    with pytest.raises(CorpusError, match=r"none\.idx and \.bin cannot be read"):
        open_remote_indexed(store / "none.bin", tmp_path / "cache", 256, NumberFiles().attach)
