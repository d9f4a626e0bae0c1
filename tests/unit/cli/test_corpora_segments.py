"""A large file in segments: the same corpus as in one go, by however many processes and after whatever kill."""

import gzip
import json
import os
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from disttrain.corpora import documents, shard
from disttrain.corpora.documents import BLOCK_BYTES, Block
from disttrain.corpora.encoders import ByteEncoder
from disttrain.corpora.look import inspect
from disttrain.corpora.prepare import prepare
from disttrain.corpora.run import Progress
from disttrain.corpora.segment_file import write_segment
from disttrain.corpora.settings import Settings
from disttrain.main import main
from disttrain_trainer.data.corpora.manifest import CorpusError, Tokenizer, TokenType
from tests.corpora import content_of, sentences, session_lives, tokens_of, trained_tokenizer, write_sources
from tests.waiting import until

SEGMENT = 40_000
LINE = b"the quick brown fox runs home, and so on\n"
TEXT = LINE * (7 * BLOCK_BYTES // 2 // len(LINE)) + b"no end of a line"


SMALL_BLOCK = 20_000
SMALL_TEXT = LINE * (7 * SMALL_BLOCK // 2 // len(LINE)) + b"no end of a line"


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    """Texts are cut after so many bytes."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", SMALL_BLOCK)


def blocks(text: bytes) -> list[bytes]:
    """Return a text cut as docs/corpora.md says: behind the line that a block's last byte is in."""
    found, at = [], 0
    while at < len(text):
        end = text.find(b"\n", at + SMALL_BLOCK - 1) + 1 or len(text)
        found.append(text[at:end])
        at = end
    return found


def asked(sources: Path, output: Path, **settings: object) -> Settings:
    return Settings(**{"sources": (sources,), "tokenizer": "bytes", "output": output, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize(("segment", "workers"), [(2**24, 1), (SEGMENT, 1), (SEGMENT, 2)])
def test_what_was_prepared_once_is_the_same_corpus_today(tmp_path: Path, segment: int, workers: int) -> None:
    """Its fingerprint is that of the version that had no segments: jobs resume with it."""
    sources = write_sources(tmp_path / "sources", lines=150)
    (sources / "large.txt").write_bytes(LINE * (7 * 2**19 // len(LINE)) + b"no end of a line")
    settings = asked(
        sources, tmp_path / "corpus", end_of_document="10", part_bytes=30_000, workers=workers, segment_bytes=segment
    )
    assert prepare(settings).fingerprint == FINGERPRINT


@pytest.mark.parametrize("end", ["10", None])
@pytest.mark.parametrize("segment", [2**24, SEGMENT, 300])
def test_each_document_begins_with_its_token_wherever_segments_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, segment: int, end: str | None
) -> None:
    """A document of several segments, and several in one; empty ones have no token at all."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", 500)
    sources = tmp_path / "sources"
    sources.mkdir()
    texts = [("x" * 99 + "\n") * 20, "", "y", *(f"line {number}" for number in range(100)), "", "z" * 1_000]
    (sources / "a.txt").write_text(texts[0])
    (sources / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1:]))
    around = {"begin_of_document": "1", "end_of_document": end}
    prepare(asked(sources, tmp_path / "corpus", segment_bytes=segment, **around))
    written = [[1, *text.encode(), *([10] if end else [])] for text in texts if text]
    assert tokens_of(tmp_path / "corpus") == [token for document in written for token in document]
    offsets = np.fromfile(tmp_path / "corpus" / "shard-000000.offsets", "<u8").tolist()
    assert offsets == [0, *accumulate(map(len, written))]
    assert inspect(tmp_path / "corpus").begin_of_document == 1


FINGERPRINT = "c2eda9654ba4bf1480075f1fe762fc0dd885bdb2e8e7ec39d256cb8a19212e4d"


def test_tokens_of_a_large_text_are_those_of_its_blocks_packed_or_not(tmp_path: Path, small_blocks) -> None:
    from tokenizers import Tokenizer

    library = Tokenizer.from_str(trained_tokenizer())
    library.no_truncation()
    (tmp_path / "tokenizer.json").write_text(trained_tokenizer())
    # The last lines have no token but the end.
    lines = [json.dumps({"text": text}) for text in (*map(sentences, range(600)), "", "")]
    content = {"a.txt": SMALL_TEXT, "b.jsonl": "\n\n".join(lines).encode()}
    for folder, pack in (("plain", lambda text: text), ("packed", gzip.compress)):
        (tmp_path / folder).mkdir()
        for name, text in content.items():
            (tmp_path / folder / (name if folder == "plain" else f"{name}.gz")).write_bytes(pack(text))
    end = library.token_to_id("<end>")
    texts = [*(block.decode() for block in blocks(SMALL_TEXT)), *map(sentences, range(600))]
    assert len(texts) == 4 + 600
    ids = [found.ids for found in library.encode_batch_fast(texts)]
    expected = [token for block in ids[:4] for token in block] + [end]
    expected += [token for text in ids[4:] for token in [*text, end]]
    for folder in ("plain", "packed"):
        progress: list[Progress] = []
        segment = 20_000 if folder == "plain" else 500
        settings = asked(
            tmp_path / folder,
            tmp_path / f"corpus-{folder}",
            tokenizer=str(tmp_path / "tokenizer.json"),
            end_of_document="<end>",
            segment_bytes=segment,
        )
        manifest = prepare(settings, progress.append)
        assert (len(manifest.shards), manifest.documents) == (1, 601)
        assert tokens_of(settings.output) == expected
        read = [now.source_bytes for now in progress]
        assert read == sorted(read)
        assert len(read) > 8
        # The packed files are so small that they are read ahead as a whole.
        assert len(set(read)) > (5 if folder == "plain" else 1)
        assert read[-1] == progress[-1].total_bytes


@pytest.mark.parametrize(("name", "workers"), [("a.txt", 1), ("a.txt", 2), ("a.txt.gz", 2)])
def test_a_kill_within_a_shard_loses_no_finished_segment(name: str, workers: int, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(TEXT if name == "a.txt" else gzip.compress(TEXT))
    whole, output, all_steps, steps = tmp_path / "whole", tmp_path / "corpus", [], []
    segment = SEGMENT if name == "a.txt" else 500
    prepare(asked(tmp_path / name, whole, segment_bytes=segment), all_steps.append)
    script = tmp_path / "program.py"
    script.write_text(KILLED_AFTER_TWO_SEGMENTS)
    command = [sys.executable, script, tmp_path / name, output, str(workers), str(segment)]
    with subprocess.Popen(command, start_new_session=True) as process:
        assert process.wait() == -signal.SIGKILL
    until(lambda: not session_lives(process.pid))
    prepare(asked(tmp_path / name, output, segment_bytes=segment, workers=workers), steps.append)
    assert len(all_steps) == 6
    assert len(steps) <= 4
    assert content_of(output) == content_of(whole)


KILLED_AFTER_TWO_SEGMENTS = """
import os, signal, sys
from pathlib import Path
from disttrain.corpora.prepare import prepare
from disttrain.corpora.settings import Settings

steps = []

def progress(now):
    steps.append(now)
    if len(steps) == 3:
        assert not now.shards
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    source, output, workers, segment = sys.argv[1:]
    settings = Settings(
        (Path(source),), "bytes", Path(output), workers=int(workers), segment_bytes=int(segment)
    )
    prepare(settings, progress)
"""


def test_a_stop_while_segments_are_joined_keeps_those_that_are(tmp_path: Path, monkeypatch) -> None:
    sources = write_sources(tmp_path / "sources", lines=150)
    (sources / "large.txt").write_bytes(TEXT)
    prepare(asked(sources, tmp_path / "whole", end_of_document="10"))
    settings = asked(sources, tmp_path / "corpus", end_of_document="10", segment_bytes=SEGMENT)
    monkeypatch.setattr(shard, "SAVED_BYTES", 50_000)
    read, seen = shard.read_segment, []

    def stopped(path, dtype):
        seen.append(path)
        if len(seen) == 5:
            raise OSError("stopped")
        return read(path, dtype)

    monkeypatch.setattr(shard, "read_segment", stopped)
    with pytest.raises(CorpusError, match="cannot be written: stopped"):
        prepare(settings)
    assert not seen[0].exists()
    prepare(settings)
    # Segments that are in the shard are not read again.
    assert len(seen) == len(set(seen)) + 1
    assert content_of(settings.output) == content_of(tmp_path / "whole")


def test_a_document_ends_with_what_follows_it_without_a_token(tmp_path: Path) -> None:
    """Three segments: some of a document, an end before which nothing is, and an empty document of its own."""
    place = shard.ShardPlace(0, tmp_path, tmp_path, tmp_path)
    texts = [[Block(b"ab", last=False)], [], [Block(b"", last=True)], [Block(b"", last=True)], [Block(b"c", last=True)]]
    ended = Tokenizer(kind="bytes", sha256=None, vocabulary=256, end_of_document=0)
    for number, own in enumerate(texts):
        write_segment(place.segment(number), own, ByteEncoder(), TokenType.UINT16.dtype, ended)
    record = shard.join_segments(place, len(texts), TokenType.UINT16, ended)
    assert np.fromfile(place.tokens, "<u2").tolist() == [97, 98, 0, 99, 0]
    assert np.fromfile(place.offsets, "<u8").tolist() == [0, 3, 5]
    assert (record.tokens, record.documents) == (5, 2)
    assert list(tmp_path.glob("000000-*")) == []


def test_a_source_that_changes_meanwhile_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)

    def change(now: Progress) -> None:
        if now.source_bytes:
            os.utime(tmp_path / "a.txt", ns=(0, 0))

    with pytest.raises(CorpusError, match=r"a\.txt has changed since it was first looked at"):
        prepare(asked(tmp_path / "a.txt", tmp_path / "corpus", segment_bytes=SEGMENT), change)


def test_the_line_is_right_in_a_segment(tmp_path: Path, small_blocks) -> None:
    bad = SMALL_TEXT + b"\n\xff\n"
    (tmp_path / "tokenizer.json").write_text(trained_tokenizer())
    for name, content in (("a.txt", bad), ("b.txt.gz", gzip.compress(bad))):
        (tmp_path / name).write_bytes(content)
        settings = asked(
            tmp_path / name, tmp_path / f"of-{name}", tokenizer=str(tmp_path / "tokenizer.json"), segment_bytes=500
        )
        with pytest.raises(CorpusError, match=rf"{name}: line {bad.count(LINE) + 2} is no UTF-8 text \(byte 0xff\)"):
            prepare(settings)


def test_lines_say_how_much_was_read(tmp_path: Path, capfd) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "abc"}\n' * 1000)
    settings = ["--tokenizer", "bytes", "--output", str(tmp_path / "corpus"), "--workers", "1"]
    assert main(["data", "prepare", str(tmp_path / "a.jsonl"), *settings]) == 0
    assert capfd.readouterr().err.splitlines()[:-1] == [
        "0 % of 0.0 MB read, 0 tokens, 0 of 1 shards",
        "100 % of 0.0 MB read, 3000 tokens, 0 of 1 shards",
        "100 % of 0.0 MB read, 3000 tokens, 1 of 1 shards",
    ]
